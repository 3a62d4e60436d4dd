"""A cell's process in a seeded world: the real one, with its engine and backend watched.

Owns: what it is built of, and the checks that only its inside can make (P6, P7). Must not know:
the controller. Invariant: behaviour is that of the shipped scripted engine and emulated cell.
"""

import contextlib
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from opengyre.engines.compute import ComputeThread
from opengyre.engines.desk import Live, Sampled
from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine
from opengyre.runtime import messages as m
from opengyre.runtime.parts import CellParts
from opengyre.runtime.planes import open_planes, pull_all
from opengyre.runtime.stages import StageProcesses
from opengyre.seams.cells import MicroStep, Rendezvous, StepCounts, UpdateNorms
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Snapshot
from opengyre.trainer.emulated import NAME, EmulatedCell, EmulatedSettings
from opengyre.trainer.wire import micro_step
from opengyre.trajectory.bundles import Bundle
from opengyre.transport.engine_server import EngineServer
from tests.sim.seeded_policy import respond

NUM_WEIGHTS = 16
Wrong = Callable[[str], None]


def checksum(weights: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(weights).tobytes())


class Lineage:
    """Which weights each version is; told by the core, compared by everyone."""

    def __init__(self, wrong: Wrong) -> None:
        self._wrong = wrong
        self.by_version: dict[int, int] = {}

    def tell(self, version: int, weights: Any, who: str) -> None:
        found = checksum(weights)
        known = self.by_version.setdefault(version, found)
        if found != known:
            self._wrong(f"P6: {who} calls other weights version {version}")


class WatchedEngine(ScriptedEngine):
    """Tokens come only from a version that was verified; its weights are that version's."""

    def __init__(self, name: str, config: ScriptedConfig, lineage: Lineage, wrong: Wrong) -> None:
        super().__init__(respond(), config)
        self.name = name
        self._lineage = lineage
        self._wrong = wrong
        self._loading: int | None = None
        self._new: Any = None
        self.is_released = False

    async def begin_update(self, version: int) -> None:
        await super().begin_update(version)
        self._loading = version

    async def push(self, name: str, tensor: Any) -> None:
        await super().push(name, tensor)
        self._new = np.array(tensor)

    async def commit(self, version: int) -> None:
        await super().commit(version)
        self._loading = None
        self._lineage.tell(version, self._new, self.name)

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    async def release(self) -> None:
        await super().release()
        self.is_released = True

    async def restore(self) -> None:
        await super().restore()
        self.is_released = False

    async def step(self, lives: Sequence[Live]) -> list[Sampled]:
        made = await super().step(lives)
        if any(one.ids for one in made):
            if self._loading is not None:
                self._wrong(f"P6: {self.name} samples while it loads version {self._loading}")
            if self.is_released:
                self._wrong(f"P6: {self.name} samples without its KV memory")
        return made


class WatchedCell(EmulatedCell):
    """Weights stand still while gradients add up; an update is the sum of its groups."""

    def __init__(self, name: str, planes: Any, watch: Any) -> None:
        super().__init__(
            weights=planes.weights,
            gradients=planes.gradients,
            settings=EmulatedSettings(num_weights=NUM_WEIGHTS),
        )
        self._name = name
        self._watch = watch
        self._lineage: Lineage = watch.lineage
        self._wrong: Wrong = watch.wrong
        self._opened: tuple[int, int] | None = None
        self.last_update: Any = None

    def open_step(self, step: int, version: int, snapshot: Snapshot | None) -> int:
        verified = super().open_step(step, version, snapshot)
        self._opened = (version, checksum(self.parameters()[NAME]))
        self._lineage.tell(version, self.parameters()[NAME], f"{self._name} in step {step}")
        return verified

    def run(self, micro_step: MicroStep) -> StepCounts:
        now = (micro_step.version, checksum(self.parameters()[NAME]))
        if now != self._opened:
            self._wrong(f"P7: {self._name} trains on {now}, it opened {self._opened}")
        return super().run(micro_step)

    def reduce_together(
        self, step: int, rendezvous: Rendezvous, others: Sequence[StepCounts]
    ) -> StepCounts:
        """As a group of processes does: all members are there, or every one fails."""
        self._ledger.check_open(step)
        total = self._ledger.total_with(others)
        members = [
            self._watch.member_of_group(one) for one in rendezvous.name.partition("/")[0].split("+")
        ]
        if rendezvous.name in self._watch.failed_groups or None in members:
            self._watch.failed_groups.add(rendezvous.name)
            raise BoundaryError("reduce", f"{rendezvous.name} lost a member", retryable=True)
        if rendezvous.rank == 0:
            self._reduced[:] = sum(one._sums for one in members)
            self._ledger.reduced = total
        return total

    def update(self, version: int) -> UpdateNorms:
        before = self.parameters()[NAME]
        norms = super().update(version)
        self._opened = None
        self.last_update = self.parameters()[NAME] - before
        if norms.is_applied:
            self._lineage.by_version.pop(version, None)
            self._lineage.tell(version, self.parameters()[NAME], f"{self._name} updated")
        return norms

    def expose_weights(self, version: int, *, pinned: Sequence[int] = ()) -> Snapshot:
        self._lineage.tell(version, self.parameters()[NAME], f"{self._name} exposes")
        return super().expose_weights(version, pinned=pinned)


def update_by(bundles: Sequence[Bundle]) -> Any:
    """What these bundles add to the weights, in one micro-step of one cell (P9)."""
    nowhere: Any = None
    settings = EmulatedSettings(num_weights=NUM_WEIGHTS)
    cell = EmulatedCell(weights=nowhere, gradients=nowhere, settings=settings)
    cell.open_step(0, 0, None)
    before = cell.parameters()[NAME]
    if bundles:
        cell.run(micro_step(bundles, step=0, number=0, version=0))
    cell.reduce([])
    cell.update(1)
    return cell.parameters()[NAME] - before


@contextlib.asynccontextmanager
async def build_cell(
    setup: m.CellSetup, *, config: ScriptedConfig, watch: Any
) -> AsyncIterator[CellParts]:
    """What `build_parts` gives for scripted engines and emulated cells; `watch` is the world."""
    with contextlib.ExitStack() as stack:
        planes = stack.enter_context(open_planes(setup))
        compute = ComputeThread()
        stack.callback(compute.close)
        engine = WatchedEngine(setup.engine, config, watch.lineage, watch.wrong)
        watch.engines[setup.engine] = engine
        backend = None
        if setup.cell is not None:
            backend = WatchedCell(setup.engine, planes, watch)
            watch.cells[setup.engine] = backend
        async with EngineServer(engine, setup.link_address) as link:
            link.close_door()
            yield CellParts(
                engine=engine,
                backend=backend,
                compute=compute,
                link=link,
                pull=partial(pull_all, planes.weights),
                stages=StageProcesses(channels=[], processes=[]),
                store_address="the world" if watch.shape.may_group else "",
            )
