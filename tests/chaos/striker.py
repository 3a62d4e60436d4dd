"""Strikes the cells of a run at the moments of a list of faults, one at a time.

Owns: signals to processes of cells and the wait until what was struck lives again. Invariant: a
fault strikes once; the next waits until the cell is replaced and every engine serves, and so does
the end of a burst: however long a start takes, a run has bursts enough for its faults.
"""

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from opengyre.control.cells import EngineState
from opengyre.runtime.run import Run
from tests.chaos.faults import Fault
from tests.chaos.tap import Seen, Tap, until

log = logging.getLogger(__name__)

STAGE_MODULE = "opengyre.runtime.stage_process"
FENCED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """`at_s` on the clock of the journal; `incarnation` of the cell that was struck."""

    fault: Fault
    at_s: float
    incarnation: int


class Striker:
    """`watch` is what a run is watched by. `left` are faults whose moment did not come yet."""

    def __init__(self, faults: list[Fault]) -> None:
        self.left = list(faults)
        self.struck: list[Struck] = []
        self._is_ready = False
        self._has_struck = asyncio.Event()

    async def watch(self, run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            Tap(
                run,
                lambda seen: self._see(run, seen, tasks),
                may_save=lambda: not absent(run),
            )
            while self.left:
                await until(lambda: _do_all_serve(run))
                self._has_struck.clear()
                self._is_ready = True
                await self._has_struck.wait()
                await self._until_replaced(run)
            await asyncio.Event().wait()

    def _see(self, run: Run, seen: Seen, tasks: asyncio.TaskGroup) -> None:
        fault = next((one for one in self.left if seen.of(one.moment, one.cell)), None)
        if fault is None or not self._is_ready:
            return
        self._is_ready = False
        self.left.remove(fault)
        if fault.depth_s:
            tasks.create_task(self._strike_later(run, fault, seen))
        else:
            self._strike(run, fault)

    async def _strike_later(self, run: Run, fault: Fault, seen: Seen) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(fault.depth_s):
                await until(lambda: not seen.is_on())
        self._strike(run, fault)

    def _strike(self, run: Run, fault: Fault) -> None:
        name = f"c{fault.cell}"
        pid = run.processes.pid(name)
        os.kill(stage_pids(pid)[fault.stage - 1] if fault.stage else pid, fault.blow.value)
        now_s = run.opened.clock.now_s()
        life = run.processes.incarnation(name)
        self.struck.append(Struck(fault=fault, at_s=now_s, incarnation=life))
        log.warning("%.2f s: %s", now_s, fault)
        self._has_struck.set()

    async def _until_replaced(self, run: Run) -> None:
        one = self.struck[-1]
        async with asyncio.timeout(FENCED_WITHIN_S):
            await until(lambda: _life(run, one.fault) > one.incarnation)


def stage_pids(lead: int) -> list[int]:
    """The processes of a cell's stages after the first, in order."""
    children = Path(f"/proc/{lead}/task").glob("*/children")
    pids = sorted(int(pid) for one in children for pid in one.read_text().split())
    return [pid for pid in pids if STAGE_MODULE in words_of(pid)]


def words_of(pid: int) -> str:
    """The command of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def _life(run: Run, fault: Fault) -> int:
    return run.processes.incarnation(f"c{fault.cell}")


def absent(run: Run) -> list[str]:
    """Engines that died and are not back yet, by the scheduler."""
    engines = run.scheduler.snapshot().engines
    return [str(one.engine) for one in engines if one.state is EngineState.ABSENT]


def _do_all_serve(run: Run) -> bool:
    engines = run.scheduler.snapshot().engines
    return not absent(run) and all(run.processes.is_alive(one.engine) for one in engines)
