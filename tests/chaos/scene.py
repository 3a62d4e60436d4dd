"""A run that a test plays along with, moment by moment, beside the matrix of faults.

Owns: waiting for a moment of satellite 1, the processes of its stages. Must not know: what is done
to them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from run_rig import EXAMPLE, Driven

from opengyre.runtime import messages as m
from opengyre.runtime.run import Run
from tests.chaos.chaos_rig import STAGED, drive_struck
from tests.chaos.faults import Moment
from tests.chaos.striker import absent, stage_pids
from tests.chaos.tap import Seen, Tap, until

SATELLITE = 1
NUM_STEPS = 8
EMULATED = ("training.emulated_tokens_per_s=600", "engine.scripted.tokens_per_s=400")


class Scene:
    """What a play is given."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tap = Tap(run, self._see, may_save=lambda: not absent(run))
        self._awaited: dict[Moment, asyncio.Future[Seen]] = {}

    def _see(self, seen: Seen) -> None:
        if seen.of(seen.moment, SATELLITE) and seen.moment in self._awaited:
            self._awaited.pop(seen.moment).set_result(seen)

    async def moment(self, moment: Moment) -> Seen:
        """The next one of the satellite."""
        self._awaited[moment] = asyncio.get_running_loop().create_future()
        return await self._awaited[moment]

    async def before(
        self, is_it: Callable[[m.Message], bool], act: Callable[[], None], *, of: str = "c1"
    ) -> None:
        """`act` once, just before the first message to cell `of` that `is_it` is sent."""
        acted = asyncio.Event()

        def look(name: str, message: m.Message) -> None:
            if name == of and not acted.is_set() and is_it(message):
                acted.set()
                act()

        self.tap.before = look
        await acted.wait()

    async def dropped(self) -> None:
        """The satellite is told to forget the step that is open."""
        await until(lambda: self.tap.num_dropped[SATELLITE] > 0)

    def pid(self, stage: int = 0) -> int:
        """Of the satellite's stage that lives now."""
        lead = self.run.processes.pid(f"c{SATELLITE}")
        return stage_pids(lead)[stage - 1] if stage else lead


Play = Callable[[Scene], Coroutine[Any, Any, None]]


def drive_scene(folder: Path, tasks: Path, play: Play, *overrides: str, is_staged: bool) -> Driven:
    """A run of `NUM_STEPS` steps with `play`, which ends before the run does."""
    plays: list[asyncio.Task[None]] = []

    async def watch(run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            plays.append(tasks.create_task(play(Scene(run))))
            await asyncio.Event().wait()

    config, sets = (STAGED, ()) if is_staged else (EXAMPLE, EMULATED)
    driven = drive_struck(
        folder,
        tasks,
        f"run.num_steps={NUM_STEPS}",
        "topology.slots_per_standalone=13",
        *sets,
        *overrides,
        watch=watch,
        config=config,
        deadline_s=300,
    )
    assert plays[0].done()
    assert not plays[0].cancelled()
    return driven
