"""The controller's side of steps over real cell processes that reduce by gloo.

Owns: processes, the groups that steps train, the weights that must come out. Must not know: when
to reduce, or how. Invariant: who dies is dropped from the open step and started again.
"""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from opengyre.control.facts import GroupAssigned, GroupReturned
from opengyre.control.ids import GroupId
from opengyre.runtime import messages as m
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.planes import pull_all
from opengyre.runtime.processes import Processes
from opengyre.runtime.step_figures import StepFigures
from opengyre.runtime.steps import StepParts, Steps
from opengyre.seams.errors import BoundaryError
from opengyre.store.observations import AnyObservation, StepReport
from opengyre.trainer.emulated import NAME, EmulatedCell, EmulatedSettings
from opengyre.trainer.group_limits import GroupLimits
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.trainer.wire import micro_step
from opengyre.trajectory.bundles import Bundle
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.training_rows import alone, line_row

MODULE = "tests.integration.reduce_cell"
GROUPS_PER_STEP = 4
LIMITS = GroupLimits(
    meet_s=1.0, connect_s=1.5, stall_s=1.0, reduce_s=10.0, grace_s=2.0, settle_s=2.0
)
WAIT_S = 60.0
NO_FIGURES = StepFigures(
    mean_reward=None, mean_shaped=None, watched_share=None, members=[], num_no_variance=0
)


class ReduceRig:
    """Use on one event loop. `num_weights` int64 sums in each of `num_cells` cells."""

    def __init__(
        self,
        folder: Path,
        *,
        num_cells: int = 3,
        num_weights: int = 4096,
        limits: GroupLimits = LIMITS,
        may_group: bool = True,
    ) -> None:
        self.folder, self.num_cells, self.limits = folder, num_cells, limits
        self._num_weights = num_weights
        for name in ("logs", "planes", "traps"):
            (folder / name).mkdir(parents=True)
        address = f"unix:{folder / 'controller.sock'}"
        self.processes = Processes(folder / "logs", address=address)
        self.inbox = Inbox()
        self.reports: list[StepReport] = []
        self.deaths: list[str] = []
        self._died_now = asyncio.Event()
        self.version = self.step = 0
        self._assigned: list[str] = []
        self._incarnations = dict.fromkeys(range(num_cells), 0)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.steps = Steps(
            StepParts(
                processes=self.processes,
                inbox=self.inbox,
                observe=self._observe,
                make_stream=self._make_stream,
                figures=lambda groups, is_applied: NO_FIGURES,
                max_groups=GROUPS_PER_STEP,
                budget_tokens=8,
                may_group=may_group,
                now_s=time.monotonic,
                limits=limits,
            )
        )

    async def start(self) -> None:
        await self.processes.listen(self._handle, self._died, self._crashed)
        async with asyncio.TaskGroup() as starts:
            for cell in range(self.num_cells):
                starts.create_task(self._start(cell))

    async def end(self) -> None:
        await self.processes.quit_all()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=WAIT_S)

    def set_trap(self, cell: int, place: str, what: str, *, after_s: float = 0.002) -> None:
        """`after_s` counts for the place "in"."""
        (self.folder / "traps" / f"c{cell}").write_text(f"{place} {what} {after_s}")

    def clear_traps(self) -> None:
        for trap in (self.folder / "traps").iterdir():
            trap.unlink()

    def pid(self, cell: int) -> int:
        return self.processes.pid(f"c{cell}")

    async def until_dead(self, cell: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while not any(one.startswith(f"c{cell}#") for one in self.deaths):
                self._died_now.clear()
                await self._died_now.wait()

    async def until_all_live(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while self._tasks:
                await asyncio.wait(self._tasks)

    async def run_step(self) -> StepReport:
        """One step of all cells, from its opening to its commit."""
        self.step = self.version + 1
        self._assigned.clear()
        await self.steps.open(self.step, self.version)
        for cell in range(1, self.num_cells):
            await self.steps.admit(self.step, cell)
        groups = tuple(GroupId(f"{self.step}/{n}") for n in range(GROUPS_PER_STEP))
        self.steps.offer(self.step, groups)
        async with asyncio.timeout(WAIT_S):
            while len(self._assigned) < GROUPS_PER_STEP:
                self._take(await self.inbox.batch(1.0))
        await self.steps.close(self.step, GROUPS_PER_STEP)
        report = self.reports[-1]
        self.version = report.version_after
        return report

    async def weights(self) -> Any:
        """What the core has now."""
        plane = SharedMemoryPlane(self.folder / "planes", slot="reader")
        return pull_all(plane, await self.steps.expose(self.version))[NAME]

    def expected(self) -> Any:
        """One cell that ran all steps so far alone, each in one micro-step."""
        nowhere: Any = None
        settings = EmulatedSettings(num_weights=self._num_weights)
        cell = EmulatedCell(weights=nowhere, gradients=nowhere, settings=settings)
        for version in range(self.version):
            cell.open_step(version + 1, version, None)
            bundles = [
                one for n in range(GROUPS_PER_STEP) for one in bundles_of(f"{version + 1}/{n}")
            ]
            cell.run(micro_step(bundles, step=version + 1, number=0, version=version))
            cell.reduce([])
            cell.update(version + 1)
        return cell.parameters()[NAME]

    async def is_exact(self) -> bool:
        return bool(np.array_equal(await self.weights(), self.expected()))

    def _make_stream(self, step: int, version: int) -> StepStream:
        settings = StreamSettings(budget_tokens=8, lease_s=30.0, max_groups=GROUPS_PER_STEP)
        return StepStream(step, version=version, bundles_of=bundles_of, settings=settings)

    def _observe(self, seen: AnyObservation) -> None:
        if isinstance(seen, StepReport):
            self.reports.append(seen)

    def _take(self, facts: list[Any]) -> None:
        for fact in facts:
            if isinstance(fact, GroupAssigned):
                self._assigned.append(str(fact.group))
            if isinstance(fact, GroupReturned):
                self._assigned.remove(str(fact.group))

    async def _start(self, cell: int) -> None:
        self._incarnations[cell] += 1
        life, name = self._incarnations[cell], f"c{cell}"
        config = {
            "limits": asdict(self.limits),
            "num_weights": self._num_weights,
            "traps": str(self.folder / "traps"),
        }
        setup = m.CellSetup(
            engine=name,
            cell=cell,
            incarnation=life,
            slots=1,
            config_json=json.dumps(config),
            link_address=f"unix:{self.folder / f'{name}-{life}.sock'}",
            plane_dir=str(self.folder / "planes"),
        )
        await self.processes.start(name, incarnation=life, module=MODULE, setup=setup)

    async def _handle(self, name: str, message: Any) -> m.Message | None:
        if isinstance(message, m.Claim):
            return await self.steps.claim(message)
        if isinstance(message, m.Finished):
            self.steps.finished(message)
            return None
        raise BoundaryError("rig", f"{name} sent {type(message).__name__}", retryable=False)

    def _died(self, name: str, incarnation: int, reason: str) -> None:
        self.deaths.append(f"{name}#{incarnation}")
        self._died_now.set()
        self._spawn(self._replace(int(name[1:])))

    async def _replace(self, cell: int) -> None:
        if cell == 0:
            await self.steps.abandon(self.step)
        else:
            await self.steps.drop_member(self.step, cell)
        await self._start(cell)

    def _crashed(self, error: BaseException) -> None:
        raise error

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def bundles_of(group: str) -> list[Bundle]:
    """Four executions of unequal length."""
    return alone(
        *(line_row(f"{group}.{k}", 3 + k, group=group, advantage=float(k)) for k in range(4))
    )
