"""Drives one step at a time: the stream, its members, the reduce and the one update.

Consumes: offers of ready groups; produces: micro-steps for claims and a StepCommitted fact.
Waits for: claims, finished micro-steps, members' sums. Unblocked by: any of these, or a death.
Invariants: a micro-step counts once (P8); the update starts only when every micro-step of the
step is done by a member whose sums entered the reduce; weights are fixed until then (P7).
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from opengyre.control.facts import GroupAssigned, GroupReturned, MemberAdmitted, StepCommitted
from opengyre.control.ids import GroupId
from opengyre.runtime import messages as m
from opengyre.runtime.digests import digest_of, fill_of
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.processes import Processes
from opengyre.runtime.reduction import (
    MAX_GROUP_FAILURES,
    SHOWN_AFTER_S,
    Reduced,
    Reducer,
    check_counts,
    total_of,
)
from opengyre.runtime.step_figures import StepFigures, work_of
from opengyre.seams.cells import MicroStep, StepCounts, UpdateNorms
from opengyre.seams.errors import BoundaryError, NoAnswer
from opengyre.seams.weights import Snapshot
from opengyre.store.observations import (
    AnyObservation,
    MemberJoined,
    MicroStepDone,
    MicroStepReturned,
    StepReport,
)
from opengyre.trainer.group_limits import DEFAULT, GroupLimits
from opengyre.trainer.stream import StepStream
from opengyre.transport.weights import gone

CLAIM_POLL_S = 1.0
CORE = "c0"
RETRY_S = 0.5
REDUCE_PATIENCE_S = 60.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenedStep:
    """`epoch` rises with each member that is dropped; `is_reduced` ends all returns; `joining` are
    members that still pull the snapshot."""

    step: int
    version: int
    snapshot: Snapshot
    stream: StepStream
    opened_s: float
    claimed: dict[int, tuple[int, MicroStep]] = field(default_factory=dict)
    joining: set[int] = field(default_factory=set)
    epoch: int = 0
    is_reduced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """`make_stream(step, version)`; `figures(groups, is_applied)` of what they trained;
    `max_groups` B; `budget_tokens` of a micro-step; `may_group`: sums may be reduced in groups."""

    processes: Processes
    inbox: Inbox
    observe: Callable[[AnyObservation], None]
    make_stream: Callable[[int, int], StepStream]
    figures: Callable[[tuple[str, ...], bool], StepFigures]
    max_groups: int
    budget_tokens: int
    may_group: bool
    now_s: Callable[[], float]
    limits: GroupLimits = DEFAULT


class Steps:
    """The shell's side of OpenStep, Admit, Offer, CloseStep, DropMember and AbandonStep."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._processes = parts.processes
        self._inbox = parts.inbox
        self._observe = parts.observe
        self._now_s = parts.now_s
        self._reducer = Reducer(
            parts.processes,
            may_group=parts.may_group,
            now_s=parts.now_s,
            limits=parts.limits,
        )
        self._open: OpenedStep | None = None
        self._changed = asyncio.Event()
        self._snapshots: dict[int, Snapshot] = {}
        self._published: dict[int, Snapshot] = {}
        self._unanswered: set[tuple[str, int]] = set()
        self.num_tokens_trained = 0

    async def expose(self, version: int) -> Snapshot:
        """The core's weights of `version`, exposed once. They are kept until the next version is,
        those that are published until a newer version is and one more is exposed."""
        if version not in self._snapshots:
            message = m.ExposeWeights(version=version, pinned=sorted(self._published))
            exposed = await self._processes.call(CORE, message)
            self._snapshots = {version: exposed.snapshot}
        return self._snapshots[version]

    async def expose_anew(self, version: int) -> Snapshot:
        """A core that was started again exposes what it restored; engines load it from now on."""
        self._snapshots.clear()
        snapshot = await self.expose(version)
        if version in self._published:
            self._published = {version: snapshot}
        return snapshot

    async def publish(self, version: int) -> None:
        """From now on `version` is what engines load."""
        self._published = {version: await self.expose(version)}

    def published(self, version: int) -> Snapshot:
        """Raises BoundaryError for another version than the last one."""
        if version not in self._published:
            raise gone(f"version {version} is not published")
        return self._published[version]

    @property
    def last_published(self) -> tuple[int, Snapshot] | None:
        """The version engines load now; None before the first publication."""
        return next(iter(self._published.items()), None)

    async def open(self, step: int, version: int) -> None:
        snapshot = await self.expose(version)
        stream = self._parts.make_stream(step, version)
        stream.admit(0)
        self._open = OpenedStep(step, version, snapshot, stream, self._now_s())
        await self._processes.call(CORE, m.JoinStep(step=step, version=version, snapshot=None))

    async def admit(self, step: int, cell: int) -> None:
        opened = self._step(step)
        message = m.JoinStep(step=step, version=opened.version, snapshot=opened.snapshot)
        if not opened.stream.admit(cell):
            raise BoundaryError("steps", f"cell {cell} was dropped from it", retryable=False)
        opened.joining.add(cell)
        is_mid_batch = bool(opened.claimed)
        joined = await self._join(cell, message)
        if self._open is not opened or cell not in opened.joining:
            raise BoundaryError(f"c{cell}", f"it joined step {step} too late", retryable=False)
        opened.joining.discard(cell)
        self.wake()
        self._inbox.tell(MemberAdmitted(step=step, cell=cell))
        self._observe(
            MemberJoined(step=step, cell=cell, is_mid_batch=is_mid_batch, pull_s=joined.pull_s)
        )

    async def _join(self, cell: int, message: m.JoinStep) -> m.Joined:
        """One that has not answered for an earlier step is not asked, and so not waited for, again;
        one that does not answer at all hangs and is ended."""
        name = f"c{cell}"
        life = (name, self._processes.incarnation(name))
        if life in self._unanswered:
            raise BoundaryError(name, "it still joins an earlier step", retryable=False)
        self._unanswered.add(life)
        try:
            joined: m.Joined = await self._processes.call(name, message)
        except NoAnswer:
            self._processes.fence(*life)
            raise
        finally:
            self._unanswered.discard(life)
        return joined

    def offer(self, step: int, groups: tuple[GroupId, ...]) -> None:
        self._step(step).stream.offer(groups)
        self.wake()

    async def close(self, step: int, num_groups: int) -> None:
        """Finish the stream, reduce, update; ends with StepCommitted."""
        opened = self._step(step)
        opened.stream.close(num_groups)
        self.wake()
        reduced = await self._reduced(opened)
        norms = await self._update(opened, reduced.counts)
        version = opened.version + 1 if norms.is_applied else opened.version
        self._open = None
        self.wake()
        self._report(opened, reduced, norms, version)
        self._inbox.tell(StepCommitted(step=step, version=version))

    async def drop_member(self, step: int, cell: int) -> None:
        """Its claimed and done micro-steps go back to the stream, unless the reduce is done."""
        opened = self._open
        if opened is None or opened.step != step or opened.is_reduced:
            return
        opened.epoch += 1
        opened.joining.discard(cell)
        for number, (holder, _) in sorted(opened.claimed.items()):
            if holder == cell:
                self._observe(MicroStepReturned(step=step, number=number, cell=cell))
                del opened.claimed[number]
        for group in opened.stream.drop_member(cell):
            self._inbox.tell(GroupReturned(group=GroupId(group), step=step))
        self.wake()
        if self._processes.is_alive(f"c{cell}"):
            await self._processes.call(f"c{cell}", m.DropStep(step=step))

    async def abandon(self, step: int) -> None:
        """The whole step is dropped, weights unchanged."""
        opened = self._step(step)
        self._open = None
        self.wake()
        for cell in opened.stream.members:
            if self._processes.is_alive(f"c{cell}"):
                await self._processes.call(f"c{cell}", m.DropStep(step=step))

    async def claim(self, asked: m.Claim) -> m.Claimed:
        """A micro-step, or none within a second, or the step is over."""
        deadline_s = self._now_s() + CLAIM_POLL_S
        while True:
            opened = self._open
            if opened is None or opened.step != asked.step:
                return m.Claimed(is_closed=True)
            made = opened.stream.claim(asked.cell, self._now_s())
            if made.is_refused:
                return m.Claimed(is_closed=True)
            for group in made.assigned:
                self._inbox.tell(GroupAssigned(group=GroupId(group), step=opened.step))
            if made.micro_step is not None:
                opened.claimed[made.micro_step.number] = (asked.cell, made.micro_step)
                return m.Claimed(micro_step=made.micro_step)
            if not await self._wait_for_change(deadline_s):
                return m.Claimed()

    def finished(self, told: m.Finished) -> None:
        """A micro-step's gradient is in a member's sums; zombies are refused by the stream."""
        opened = self._open
        if opened is None or opened.step != told.step:
            return
        if opened.stream.done(told.cell, told.number, self._now_s()):
            _, micro_step = opened.claimed[told.number]
            self.num_tokens_trained += told.num_tokens
            self._observe(_done_row(told, micro_step))
            self.wake()

    def holds_work(self, cell: int) -> bool:
        """Has `cell` claimed a micro-step of the open step."""
        if self._open is None:
            return False
        return any(holder == cell for holder, _ in self._open.claimed.values())

    def overdue(self) -> tuple[int, ...]:
        """Cells that hold a claim longer than its lease: hung, to be fenced."""
        return () if self._open is None else self._open.stream.overdue(self._now_s())

    async def _reduced(self, opened: OpenedStep) -> Reduced:
        """Every micro-step is done and every member's sums are with the core, each once."""
        tries, started_s = 0, 0.0
        failed: list[tuple[int, float]] = []
        while True:
            await self._drained(opened)
            tries, started_s = tries + 1, started_s or self._now_s()
            epoch = opened.epoch
            try:
                reduced = await self._reduce_once(opened)
            except BoundaryError as error:
                log.warning("step %d: try %d to reduce failed: %s", opened.step, tries, error)
                failed.append((epoch, self._now_s()))
                if self._is_hopeless(failed) or not self._processes.is_alive(CORE):
                    raise
                await self._wait_for_change(self._now_s() + RETRY_S)
                self._check(opened)
                continue
            self._check(opened)
            if opened.epoch == epoch:
                check_counts(reduced.counts, opened.stream.done_counts(), opened.step)
                opened.is_reduced = True
                seconds = self._now_s() - started_s
                return replace(reduced, num_tries=tries, seconds=seconds)

    def _is_hopeless(self, failed: Sequence[tuple[int, float]]) -> bool:
        """Do the same members fail for long, the star included?"""
        times_s = [at_s for epoch, at_s in failed if epoch == failed[-1][0]]
        is_late = self._now_s() - times_s[0] > REDUCE_PATIENCE_S
        return is_late and len(times_s) > MAX_GROUP_FAILURES

    async def _drained(self, opened: OpenedStep) -> None:
        """All micro-steps are done, and who was admitted has joined or was dropped: leases and the
        deadline of joins bound both."""
        show_s = self._now_s() + SHOWN_AFTER_S
        while opened.joining or not opened.stream.is_drained:
            await self._wait_for_change(self._now_s() + CLAIM_POLL_S)
            self._check(opened)
            if self._now_s() >= show_s:
                show_s += SHOWN_AFTER_S
                log.warning("step %d waits for %s", opened.step, _missing(opened))

    def _check(self, opened: OpenedStep) -> None:
        """Raises BoundaryError if this step was abandoned, even if it is open anew."""
        if self._open is not opened:
            raise BoundaryError("steps", f"step {opened.step} was abandoned", retryable=False)

    async def _reduce_once(self, opened: OpenedStep) -> Reduced:
        """One try: who settles is a member of it."""
        step, epoch = opened.step, opened.epoch
        settled = await self._reducer.settle(step, opened.stream.members)
        self._check(opened)
        if opened.epoch != epoch:
            raise BoundaryError("steps", "a member was dropped meanwhile", retryable=True)
        check_counts(total_of(settled.values()), opened.stream.done_counts(), step)
        return await self._reducer.reduce(step, epoch, settled)

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
        self, opened: OpenedStep, reduced: Reduced, norms: UpdateNorms, version: int
    ) -> None:
        counts, groups = reduced.counts, opened.stream.assigned
        figures = self._parts.figures(groups, norms.is_applied)
        made = [one for _, one in opened.claimed.values()]
        self._observe(
            StepReport(
                step=opened.step,
                version_before=opened.version,
                version_after=version,
                groups=list(groups),
                micro_steps=sorted(counts.micro_steps),
                num_executions=counts.num_executions,
                num_tokens=counts.num_tokens,
                num_clipped=counts.num_clipped,
                divergence=_finite(counts.divergence_sum / max(1, counts.num_tokens)),
                loss=_finite(norms.loss),
                grad_norm=_finite(norms.grad_norm),
                is_applied=norms.is_applied,
                reason=norms.reason,
                is_short=len(groups) < self._parts.max_groups,
                mean_reward=figures.mean_reward,
                mean_shaped=figures.mean_shaped,
                watched_share=figures.watched_share,
                members=figures.members,
                num_no_variance=figures.num_no_variance,
                num_flat_tokens=sum(len(one.token_ids) for one in made),
                num_repeated_tokens=sum(one.num_repeated_tokens for one in made),
                fill=fill_of(made, self._parts.budget_tokens),
                reduced_by=reduced.form,
                num_reduce_tries=reduced.num_tries,
                reduce_s=reduced.seconds,
                stages=reduced.stages,
                cells=work_of(opened.stream),
                opened_s=opened.opened_s,
                closed_s=self._now_s(),
            )
        )

    def _step(self, step: int) -> OpenedStep:
        if self._open is None or self._open.step != step:
            raise BoundaryError("steps", f"step {step} is not open", retryable=False)
        return self._open

    def wake(self) -> None:
        """Whoever waits for the step looks again; also told when rows of a group are prepared."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, deadline_s: float) -> bool:
        """True when something changed before the deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._now_s())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


def _done_row(told: m.Finished, micro_step: MicroStep) -> MicroStepDone:
    return MicroStepDone(
        step=told.step,
        number=told.number,
        cell=told.cell,
        groups=list(dict.fromkeys(path.group for path in micro_step.paths)),
        num_tokens=told.num_tokens,
        run_s=told.run_s,
        paths=[digest_of(micro_step, path) for path in micro_step.paths],
    )


def _missing(opened: OpenedStep) -> str:
    """What its reduction waits for, in words."""
    cells = sorted({holder for holder, _ in opened.claimed.values()} | opened.joining)
    return f"cells {cells}, of which {sorted(opened.joining)} still join"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
