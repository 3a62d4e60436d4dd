"""A whole run on scripted engines and emulated cells, made and read back by tests.

Everything is real but the arithmetic: processes, HTTP, the agent program in its sandbox, graders.
"""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opengyre.config.load import load_config
from opengyre.control import facts as f
from opengyre.runtime import messages as m
from opengyre.runtime.prepare import prepare
from opengyre.runtime.run import Run, RunEnd, train
from opengyre.store.codec import JournalValue
from opengyre.store.journal import Row, read_journal
from opengyre.store.observations import TurnRecorded
from opengyre.store.segments import SegmentReader

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "scripted.toml"
MAKE_TASKS = ROOT / "examples" / "quickstart" / "make_tasks.py"
RUN_DEADLINE_S = 90

Watch = Callable[[Run], Coroutine[Any, Any, None]]


async def only_watch(run: Run) -> None:
    """Nothing is done to the run."""


@dataclass(frozen=True, slots=True)
class Driven:
    """A run that ended, and its journal."""

    end: RunEnd
    rows: list[Row]

    @property
    def values(self) -> list[JournalValue]:
        return [row.value for row in self.rows]

    def all(self, kind: type) -> list[Any]:
        return [value for value in self.values if isinstance(value, kind)]

    def outcomes(self) -> dict[str, f.Outcome]:
        return {fact.execution: fact.outcome for fact in self.all(f.ExecutionClosed)}

    def completions(self) -> dict[str, tuple[int, ...]]:
        """Ids of each committed turn, read from the run folder's segments."""
        reader = SegmentReader(self.end.folder / "tokens")
        turns = [told.turn for told in self.all(TurnRecorded) if told.turn.is_committed]
        return {turn.turn: tuple(reader.read(turn.ref).completion_ids) for turn in turns}


def make_trails(folder: Path, num: int) -> Path:
    """Tasks whose course does not depend on time: the trail half of a quickstart set."""
    whole = folder.with_name(f"{folder.name}-all")
    command = [sys.executable, str(MAKE_TASKS), "--seed", "5", "--num", str(2 * num)]
    subprocess.run([*command, "--out", str(whole)], check=True, timeout=30)
    folder.mkdir()
    for task in sorted(whole.glob("*-trail")):
        shutil.move(task, folder / task.name)
    return folder


def drive(
    tmp_path: Path,
    tasks: Path,
    *overrides: str,
    watch: Watch = only_watch,
    config: Path = EXAMPLE,
    deadline_s: float = RUN_DEADLINE_S,
) -> Driven:
    """Run `config` on `tasks` with `overrides`."""
    sets = [f'tasks=[{{path="{tasks}"}}]', *overrides]
    prepared = prepare(load_config(config, sets))
    folder = tmp_path / "run"

    async def body() -> RunEnd:
        async with asyncio.timeout(deadline_s):
            return await train(prepared, folder, is_unsafe_allowed=False, watch=watch)

    end = asyncio.run(body())
    return Driven(end, list(read_journal(folder / "run.db")))


async def stir(run: Run, *, every_s: float) -> None:
    """Freeze everything at one engine after the other, as a publication does; for ever."""
    while True:
        for spec in run.opened.prepared.scheduler.engines:
            await asyncio.sleep(every_s)
            if run.scheduler.snapshot().waterlevel and _is_serving(run, spec.engine):
                await run.gateways.shut_door(spec.engine)
                await run.processes.call(spec.engine, m.FreezeAll())
                await run.processes.call(spec.engine, m.AdmitRequests())
                await run.gateways.open_door(spec.engine)


def _is_serving(run: Run, engine: str) -> bool:
    views = {view.engine: view for view in run.scheduler.snapshot().engines}
    return run.processes.is_alive(engine) and views[engine].state.value == "open"


async def until_tokens_flow(run: Run) -> None:
    """Returns once the first turns were recorded."""
    await until(lambda: run.told.num_sampled_tokens > 0)


async def until_trains(run: Run, cell: int) -> None:
    """Returns once `cell` holds a micro-step of an open step."""
    await until(lambda: run.steps.holds_work(cell))


async def until(is_so: Callable[[], bool]) -> None:
    """Look every 10 ms until it is so."""
    for _ in range(RUN_DEADLINE_S * 100):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError
