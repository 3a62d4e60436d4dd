"""A cell's (or a standalone engine's) process: one set of weights, one compute thread, two roles.

Owns: the order inside a role change on this side. Must not know: why it changes, or what other
cells do. Invariants: the engine's door is shut before its requests are frozen; a forward pass of
the engine, a micro-step and a weight update never overlap; an engine admits requests only under a
version it verified.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from safetensors import SafetensorError

from opengyre.engines.desk import STEP_DEADLINE_S
from opengyre.runtime import messages as m
from opengyre.runtime.cell_memory import CellMemory
from opengyre.runtime.child import Child, run_child
from opengyre.runtime.claims import Claims, WorkInHand
from opengyre.runtime.parts import CellParts, build_parts
from opengyre.runtime.stages import StageProcesses
from opengyre.seams.cells import CellBackend, StepCounts
from opengyre.seams.engine import EngineStats
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Snapshot
from opengyre.store.observations import Role
from opengyre.transport.framed import Peer

HEALTH_EVERY_S = 1.0
MAX_STILL_LOOKS = int(STEP_DEADLINE_S / HEALTH_EVERY_S)

log = logging.getLogger(__name__)


class Progress:
    """Looks are counted, not seconds: a process that was stopped was not looked at meanwhile."""

    def __init__(self) -> None:
        self._made: tuple[int, ...] = ()
        self._num_still = 0

    def look(self, stats: EngineStats) -> int:
        """How many times in a row requests ran and nothing was made since the look before."""
        made = (stats.num_generated_tokens, stats.num_prefill_tokens, stats.num_imported_tokens)
        is_still = stats.num_running > 0 and made == self._made
        self._num_still = self._num_still + 1 if is_still else 0
        self._made = made
        return self._num_still


class CellProcess:
    """Handles what the controller asks; tokens travel on the engine link, not here.

    A failed micro-step ends the process: the controller sees a death and redoes its work.
    """

    def __init__(
        self, child: Child, setup: m.CellSetup, parts: CellParts, tasks: asyncio.TaskGroup
    ) -> None:
        self._child = child
        self._setup = setup
        self._parts = parts
        self._tasks = tasks
        self._memory = CellMemory(parts)
        self._claims: asyncio.Task[None] | None = None

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def watch_health(self) -> None:
        """A broken engine ends the process: it is replaced, not asked again and again. So does one
        that hangs in a step; nobody could wait for the end of that."""
        progress = Progress()
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            stats = self._parts.engine.stats()
            if stats.failure:
                raise BoundaryError("engine", stats.failure, retryable=False)
            if progress.look(stats) >= MAX_STILL_LOOKS:
                log.error("this process ends: its engine made nothing in %g s", STEP_DEADLINE_S)
                await self._child.die()

    async def handle(self, message: Any) -> m.Message | None:
        match message:
            case m.FreezeAll():
                return await self._freeze(keeps_kv=message.keeps_kv)
            case m.AdmitRequests():
                self._parts.link.open_door()
                return m.Done()
            case m.LoadVersion():
                return await self._load(message.version, message.snapshot)
            case _:
                return await self._train(message, self._backend)

    async def _freeze(self, *, keeps_kv: bool) -> m.Frozen:
        link = self._parts.link
        link.close_door()
        stats = self._parts.engine.stats()
        await link.freeze_all(keeps_kv=keeps_kv)
        return m.Frozen(num_requests=stats.num_running + stats.num_waiting)

    @property
    def _backend(self) -> CellBackend:
        if self._parts.backend is None:
            raise BoundaryError("cell", "a standalone engine never trains", retryable=False)
        return self._parts.backend

    async def _train(self, message: Any, backend: CellBackend) -> m.Message:
        """The two halves of a role change; all else is about steps."""
        compute, engine = self._parts.compute, self._parts.engine
        match message:
            case m.BeTrainer():
                await self._memory.begin(backend)
                await engine.pause()
                await engine.release()
                await compute.run(backend.enter_training)
                return m.RoleTaken(memory=await self._memory.end(backend, Role.TRAINING))
            case m.BeEngine():
                await self._stop_claims()
                await self._memory.begin(backend)
                await compute.run(backend.leave_training)
                await engine.restore()
                return await self._load(message.version, message.snapshot)
            case m.JoinStep():
                return await self._join(message, backend)
            case m.DropStep():
                await self._stop_claims()
                await compute.run(backend.drop_sums)
                return m.Done()
            case _:
                return await compute.run(_compute_for_step, message, backend)

    async def _load(self, version: int, snapshot: Snapshot) -> m.Loaded:
        """Pause, pull, verify, write in place, switch the version, resume (all or nothing)."""
        engine = self._parts.engine
        tensors = await asyncio.to_thread(self._parts.pull, snapshot)
        await engine.pause()
        await engine.begin_update(version)
        for name, tensor in tensors.items():
            await engine.push(name, tensor)
        await engine.commit(version)
        await engine.resume()
        report = None
        if self._memory.is_changing:
            report = await self._memory.end(self._backend, Role.ROLLOUT)
        return m.Loaded(version=version, checksum=snapshot.checksum, memory=report)

    async def _join(self, message: m.JoinStep, backend: CellBackend) -> m.Joined:
        await self._stop_claims()
        started_s = self._now_s()
        version = await self._parts.compute.run(
            backend.open_step, message.step, message.version, message.snapshot
        )
        self._claims = self._tasks.create_task(self._claim_until_closed(message.step, backend))
        return m.Joined(step=message.step, version=version, pull_s=self._now_s() - started_s)

    async def _claim_until_closed(self, step: int, backend: CellBackend) -> None:
        """Claim, run, tell; the controller answers within a second even if there is nothing.

        The next claim is asked for while one runs, so that a pipeline stays full and a single
        stage never waits; while none comes, what is in flight runs to its end.
        """
        peer, setup = self._child.peer, self._setup
        if peer is None or setup.cell is None:
            return
        try:
            await self._claim_and_run(step, peer, setup.cell, backend)
        except BoundaryError as error:
            if error.boundary != "pipeline":
                raise
            log.error("this cell ends: %s", error)
            await self._child.die()

    async def _claim_and_run(self, step: int, peer: Peer, cell: int, backend: CellBackend) -> None:
        claim = m.Claim(step=step, cell=cell, incarnation=self._setup.incarnation)
        work = WorkInHand(self._now_s)
        with contextlib.closing(Claims(peer, claim, self._tasks)) as claims:
            while True:
                asked = claims.ask()
                while work and not asked.done():
                    self._tell(claim, work, await self._parts.compute.run(backend.finish_one))
                claimed = await claims.take()
                if claimed.is_closed:
                    return
                if claimed.micro_step is None:
                    continue
                claims.ask()
                work.start(claimed.micro_step)
                ended = await self._parts.compute.run(backend.run, claimed.micro_step)
                self._tell(claim, work, ended)

    def _tell(self, claim: m.Claim, work: WorkInHand, ended: StepCounts) -> None:
        """The gradients of what `ended` are in this cell's sums."""
        for micro_step, run_s in work.end(ended.micro_steps):
            self._child.tell(
                m.Finished(
                    step=claim.step,
                    number=micro_step.number,
                    cell=claim.cell,
                    incarnation=claim.incarnation,
                    num_tokens=len(micro_step.token_ids),
                    run_s=run_s,
                )
            )

    async def _stop_claims(self) -> None:
        """The loop ends at its next wait; a micro-step that runs finishes in the thread."""
        claims, self._claims = self._claims, None
        if claims is not None:
            claims.cancel()
            await asyncio.wait([claims])


def _compute_for_step(message: Any, backend: CellBackend) -> m.Message:
    """In the compute thread: what needs nothing but the training side."""
    match message:
        case m.ExposeWeights():
            snapshot = backend.expose_weights(message.version, pinned=message.pinned)
            return m.Exposed(snapshot=snapshot)
        case m.Settle():
            counts, stages = backend.settle(message.step)
            return m.Settled(step=message.step, counts=counts, stages=stages)
        case m.ReduceTogether():
            total = backend.reduce_together(message.step, message.rendezvous, message.others)
            return m.Reduced(counts=total)
        case m.ShareGradients():
            snapshot, counts = backend.expose_gradients(message.step)
            return m.Gradients(snapshot=snapshot, counts=counts)
        case m.ReduceStep():
            members = [(one.snapshot, one.counts) for one in message.members]
            return m.Reduced(counts=backend.reduce(members))
        case m.UpdateStep():
            return m.Updated(norms=backend.update(message.version))
        case m.SaveState():
            _save(backend, message.folder)
        case m.RestoreState():
            backend.restore(message.folder)
        case _:
            what = f"does not take {type(message).__name__}"
            raise BoundaryError("cell", what, retryable=False)
    return m.Done()


def _save(backend: CellBackend, folder: str) -> None:
    try:
        backend.save(folder)
    except (OSError, SafetensorError) as error:
        raise BoundaryError("checkpoint", str(error), retryable=False) from error


async def _die_with_stages(child: Child, stages: StageProcesses) -> None:
    """A cell that lost a stage can finish nothing: it is dead at once, as its stage is."""
    try:
        await stages.watch()
    except BoundaryError as error:
        log.error("this cell ends: %s", error)
        await child.die()


BuildParts = Callable[[m.CellSetup], AbstractAsyncContextManager[CellParts]]


async def main(address: str, child: Child, *, build: BuildParts = build_parts) -> None:
    async with asyncio.TaskGroup() as tasks:
        setup = await child.connect(address, tasks)
        if not isinstance(setup, m.CellSetup):
            raise BoundaryError("cell", "expected a cell's setup", retryable=False)
        async with build(setup) as parts:
            cell = CellProcess(child, setup, parts, tasks)
            child.serve_with(cell.handle)
            health = [
                tasks.create_task(cell.watch_health()),
                tasks.create_task(_die_with_stages(child, parts.stages)),
            ]
            child.tell(
                m.CellReady(
                    engine=setup.engine,
                    incarnation=setup.incarnation,
                    link_address=parts.link.address,
                    version=0,
                    checksum=0,
                    store_address=parts.store_address,
                )
            )
            await child.quit.wait()
            for one in health:
                one.cancel()
        child.hang_up()


if __name__ == "__main__":
    run_child(main)
