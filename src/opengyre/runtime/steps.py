"""Drives one step at a time: the stream, its members, the reduce and the one update.

Consumes: offers of ready groups; produces: micro-steps for claims and a StepCommitted fact.
Waits for: claims, finished micro-steps, members' sums. Unblocked by: any of these, or a death.
Invariants: a micro-step counts once (P8); the update starts only when every micro-step of the
step is done by a member whose sums entered the reduce; weights are fixed until then (P7).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from opengyre.control.facts import GroupAssigned, GroupReturned, MemberAdmitted, StepCommitted
from opengyre.control.ids import GroupId
from opengyre.runtime import messages as m
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.processes import Processes
from opengyre.seams.cells import StepCounts, UpdateNorms
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Descriptor
from opengyre.store.observations import MemberJoined, MicroStepDone, Observation, StepReport
from opengyre.trainer.stream import StepStream

CLAIM_POLL_S = 1.0
CORE = "c0"
RETRY_S = 0.05


@dataclass(slots=True)
class OpenedStep:
    """`epoch` rises with each member that is dropped; `is_reduced` ends all returns."""

    step: int
    version: int
    snapshot: Descriptor
    stream: StepStream
    opened_s: float
    members: list[int] = field(default_factory=lambda: [0])
    num_groups: int = 0
    epoch: int = 0
    is_reduced: bool = False


class Steps:
    """The shell's side of OpenStep, Admit, Offer, CloseStep, DropMember and AbandonStep."""

    def __init__(
        self,
        *,
        processes: Processes,
        inbox: Inbox,
        observe: Callable[[Observation], None],
        make_stream: Callable[[int, int], StepStream],
        now_s: Callable[[], float],
    ) -> None:
        self._processes = processes
        self._inbox = inbox
        self._observe = observe
        self._make_stream = make_stream
        self._now_s = now_s
        self._open: OpenedStep | None = None
        self._changed = asyncio.Event()
        self._groups_by_number: dict[int, tuple[str, ...]] = {}
        self.snapshots: dict[int, Descriptor] = {}

    async def expose(self, version: int) -> Descriptor:
        """The core's weights of `version`, exposed once and kept until the next version."""
        if version not in self.snapshots:
            exposed = await self._processes.call(CORE, m.ExposeWeights(version=version))
            self.snapshots = {version: exposed.snapshot}
        return self.snapshots[version]

    async def open(self, step: int, version: int) -> None:
        snapshot = await self.expose(version)
        self._groups_by_number.clear()
        self._open = OpenedStep(
            step=step,
            version=version,
            snapshot=snapshot,
            stream=self._make_stream(step, version),
            opened_s=self._now_s(),
        )
        await self._processes.call(CORE, m.JoinStep(step=step, version=version, snapshot=None))

    async def admit(self, step: int, cell: int) -> None:
        opened = self._step(step)
        message = m.JoinStep(step=step, version=opened.version, snapshot=opened.snapshot)
        opened.members.append(cell)
        joined = await self._processes.call(f"c{cell}", message)
        self._inbox.tell(MemberAdmitted(step=step, cell=cell))
        is_mid_batch = bool(self._groups_by_number)
        self._observe(
            MemberJoined(step=step, cell=cell, is_mid_batch=is_mid_batch, pull_s=joined.pull_s)
        )

    def offer(self, step: int, groups: tuple[GroupId, ...]) -> None:
        self._step(step).stream.offer(groups)
        self._wake()

    async def close(self, step: int, num_groups: int) -> None:
        """Finish the stream, reduce, update; ends with StepCommitted."""
        opened = self._step(step)
        opened.num_groups = num_groups
        opened.stream.close(num_groups)
        self._wake()
        counts = await self._reduced(opened)
        norms = await self._update(opened, counts)
        version = opened.version + 1 if norms.is_applied else opened.version
        self._open = None
        self._wake()
        self._report(opened, counts, norms, version)
        self._inbox.tell(StepCommitted(step=step, version=version))

    async def drop_member(self, step: int, cell: int) -> None:
        """Its claimed and done micro-steps go back to the stream, unless the reduce is done."""
        opened = self._open
        if opened is None or opened.step != step or opened.is_reduced:
            return
        if cell in opened.members:
            opened.members.remove(cell)
        opened.epoch += 1
        for group in opened.stream.drop_member(cell):
            self._inbox.tell(GroupReturned(group=group, step=step))
        self._wake()
        if self._processes.is_alive(f"c{cell}"):
            await self._processes.call(f"c{cell}", m.DropStep(step=step))

    async def abandon(self, step: int) -> None:
        """The whole step is dropped, weights unchanged."""
        opened = self._step(step)
        self._open = None
        self._wake()
        for cell in opened.members:
            if self._processes.is_alive(f"c{cell}"):
                await self._processes.call(f"c{cell}", m.DropStep(step=step))

    async def claim(self, asked: m.Claim) -> m.Claimed:
        """A micro-step, or none within a second, or the step is over."""
        deadline_s = time.monotonic() + CLAIM_POLL_S
        while True:
            opened = self._open
            if opened is None or opened.step != asked.step or asked.cell not in opened.members:
                return m.Claimed(is_closed=True)
            micro_step = opened.stream.claim(asked.cell, self._now_s())
            for group in opened.stream.take_newly_assigned():
                self._inbox.tell(GroupAssigned(group=GroupId(group), step=opened.step))
            if micro_step is not None:
                groups = tuple(dict.fromkeys(s.group for s in micro_step.segments))
                self._groups_by_number[micro_step.number] = groups
                return m.Claimed(micro_step=micro_step)
            if not await self._wait_for_change(deadline_s):
                return m.Claimed()

    def finished(self, told: m.Finished) -> None:
        """A micro-step's gradient is in a member's sums; zombies are refused by the stream."""
        opened = self._open
        if opened is None or opened.step != told.step:
            return
        if opened.stream.done(told.cell, told.number):
            self._observe(
                MicroStepDone(
                    step=told.step,
                    number=told.number,
                    cell=told.cell,
                    groups=list(self._groups_by_number[told.number]),
                    num_tokens=told.num_tokens,
                )
            )
            self._wake()

    async def _reduced(self, opened: OpenedStep) -> StepCounts:
        """Every micro-step is done and every member's sums are with the core, in cell order."""
        while True:
            while not opened.stream.is_drained:
                await self._wait_for_change(time.monotonic() + CLAIM_POLL_S)
                self._step(opened.step)
            epoch = opened.epoch
            try:
                counts = await self._reduce_once(opened)
            except BoundaryError:
                if not self._processes.is_alive(CORE):
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            if opened.epoch == epoch:
                opened.is_reduced = True
                return counts

    async def _reduce_once(self, opened: OpenedStep) -> StepCounts:
        members = []
        for cell in sorted(set(opened.members) - {0}):
            share = m.ShareGradients(step=opened.step)
            members.append(await self._processes.call(f"c{cell}", share))
        reduced = await self._processes.call(
            CORE, m.ReduceStep(step=opened.step, members=members)
        )
        counts: StepCounts = reduced.counts
        return counts

    async def _update(self, opened: OpenedStep, counts: StepCounts) -> UpdateNorms:
        if counts.num_tokens == 0:
            return UpdateNorms(
                grad_norm=0.0, loss=0.0, learning_rate=0.0, is_applied=False, reason="no tokens"
            )
        message = m.UpdateStep(step=opened.step, version=opened.version + 1)
        updated = await self._processes.call(CORE, message)
        norms: UpdateNorms = updated.norms
        return norms

    def _report(
        self, opened: OpenedStep, counts: StepCounts, norms: UpdateNorms, version: int
    ) -> None:
        self._observe(
            StepReport(
                step=opened.step,
                version_before=opened.version,
                version_after=version,
                num_groups=opened.num_groups,
                num_executions=counts.num_executions,
                num_tokens=counts.num_tokens,
                loss=norms.loss,
                grad_norm=norms.grad_norm,
                is_applied=norms.is_applied,
                reason=norms.reason,
                opened_s=opened.opened_s,
            )
        )

    def _step(self, step: int) -> OpenedStep:
        if self._open is None or self._open.step != step:
            raise BoundaryError("steps", f"step {step} is not open", retryable=False)
        return self._open

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, deadline_s: float) -> bool:
        """True when something changed before the deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
