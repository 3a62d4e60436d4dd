"""Steps: open, admit, offer, close (rules 4 and 5, 2.3).

Owns: what the stream is told. Must not know: micro-steps, roles beyond "in training".
Invariants: only groups that keep every older group's deadline are offered, B at most; nothing
joins a step that closes.
"""

from collections.abc import Container

from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole
from opengyre.control.commands import Admit, CloseStep, Offer, OpenStep
from opengyre.control.config import Overdue
from opengyre.control.groups import Group, GroupState
from opengyre.control.ids import GroupId
from opengyre.control.members import cancel
from opengyre.control.recovery import drop_member
from opengyre.control.run_state import Committed, RunState
from opengyre.control.staleness import Places, VersionLoad, choose
from opengyre.control.step_record import Member, MemberState, StepRecord, StepState

UNBOUNDED = 1 << 30


def advance(run: RunState, now_s: float) -> None:
    if run.burst.phase is not Phase.RUNNING:
        return
    if run.step is None:
        _open_next(run)
    step = run.step
    if step is None or step.state is not StepState.OPEN:
        return
    _offer(run, step)
    if run.need == 0:
        if not _is_dropping(run, step):
            _close(run, step)
        return
    _admit(run, step, now_s)


def check_join_deadlines(run: RunState, now_s: float) -> None:
    if run.step is None:
        return
    waited_s = run.config.join_deadline_s
    while (member := run.step.next_to_join) is not None and now_s >= member.deadline_s:
        drop_member(run, member.cell, f"it did not join within {waited_s:.0f} s")


def committed(run: RunState, step: StepRecord, version: int) -> None:
    """The one update is done: its groups are consumed."""
    groups = tuple(step.assigned.values())
    for group in groups:
        run.groups.move(group, GroupState.CONSUMED)
    is_short = 0 < len(groups) < run.config.groups_per_step
    run.undurable.append(Committed(step=step.step, groups=groups, is_short=is_short))
    run.num_short_steps += is_short
    run.num_empty_steps += not groups
    run.version = version
    run.steps_done += 1
    run.burst.num_done += 1
    run.step = None


def _open_next(run: RunState) -> None:
    core, burst = run.core, run.burst
    is_free = core.role is CellRole.TRAINING and not core.must_return
    is_waiting = run.outbox.is_pending(run.checkpoint) or run.outbox.is_pending(run.abandon)
    if not is_free or burst.num_left <= 0 or is_waiting:
        return
    if not run.redo:
        drop_overdue(run)
    if run.groups.num_outstanding == 0:
        return
    redo = run.redo.popleft() if run.redo else None
    step = StepRecord(
        step=run.steps_done + 1,
        version=run.version,
        fixed=None if redo is None else redo.groups,
        is_exact=redo is not None and redo.is_exact,
    )
    run.step = step
    run.topology.gather_joiners()
    out = run.outbox
    words = f"step {burst.num_done + 1} of {burst.num_steps} in burst {burst.number}"
    reason = words if redo is None else f"{words}, again with {len(redo.groups)} groups"
    out.add(OpenStep(command_id=out.new_id(), reason=reason, step=step.step, version=step.version))


def drop_overdue(run: RunState) -> None:
    """Groups no step may train any more: in "drop", or after a recall or a resume."""
    oldest = run.version - run.config.staleness_bound
    for version in run.groups.versions():
        if version >= oldest:
            return
        for group in (*run.groups.ready_of(version), *tuple(run.groups.live_of(version))):
            _drop(run, group)


def _drop(run: RunState, group: Group) -> None:
    reason = f"{group.group} of version {group.version} is too old for version {run.version}"
    run.groups.move(group, GroupState.DROPPED)
    run.is_dirty = True
    for member in group.members:
        execution = run.executions.unfinished.get(member)
        if execution is not None:
            cancel(run, execution, reason)


def _admit(run: RunState, step: StepRecord, now_s: float) -> None:
    if not run.topology.unjoined:
        return
    out = run.outbox
    joiners = sorted(run.topology.unjoined.values(), key=lambda one: one.cell)
    run.topology.unjoined.clear()
    for cell in joiners:
        if cell.cell in step.members:
            continue
        reason = f"{cell.name} joins with {len(step.assigned)} groups assigned, {run.need} to come"
        admit = out.add(
            Admit(command_id=out.new_id(), reason=reason, step=step.step, cell=cell.cell)
        )
        deadline_s = now_s + run.config.join_deadline_s
        step.add_member(Member(cell=cell.cell, deadline_s=deadline_s, admit=admit))


def _offer(run: RunState, step: StepRecord) -> None:
    if step.revision == run.groups.revision:
        return
    step.revision = run.groups.revision
    more = _may_take(run, step)
    if _is_gated(run, step, len(more)):
        return
    for group in more:
        step.offered[group.group] = group
    if len(step.offered) == len(step.told):
        return
    offered = sorted(step.offered.values(), key=lambda group: (group.version, group.number))
    listed = tuple(group.group for group in offered)
    step.told = dict.fromkeys(listed)
    out = run.outbox
    words = f"{run.groups.num_ready} ready, {len(step.assigned)} assigned, {run.need} needed"
    out.add(Offer(command_id=out.new_id(), reason=words, step=step.step, groups=listed))


def _is_gated(run: RunState, step: StepRecord, num_more: int) -> bool:
    """Without streaming nothing is offered before the whole step can be."""
    if run.config.is_streaming or step.fixed is not None:
        return False
    return len(step.offered) + num_more < run.need


def _may_take(run: RunState, step: StepRecord) -> list[Group]:
    """Groups that may be offered beside those that are."""
    if step.fixed is None and len(step.offered) + len(step.assigned) >= run.config.groups_per_step:
        step.blocked_by = None
        return []
    held = {**step.offered, **step.assigned}
    fixed = [group for group in step.fixed or () if group.group not in held]
    if step.is_exact:
        return fixed
    held.update((group.group, group) for group in fixed)
    config = run.config
    is_waiting = config.overdue is Overdue.WAIT
    places = Places(
        step_version=step.version,
        num_places=config.groups_per_step - len(held),
        places_per_step=config.groups_per_step,
        max_staleness=config.staleness_bound if is_waiting else UNBOUNDED,
    )
    choice = choose(_loads(run, held.keys()), places)
    step.blocked_by = choice.blocked_by
    return fixed + [run.groups.by_id[group] for group in choice.groups]


def _loads(run: RunState, held: Container[GroupId]) -> list[VersionLoad]:
    book = run.groups
    return [
        VersionLoad(
            version=version,
            ready=tuple(g.group for g in book.ready_of(version) if g.group not in held),
            num_live=book.num_live_of(version),
        )
        for version in book.versions()
    ]


def _is_dropping(run: RunState, step: StepRecord) -> bool:
    """A member is being dropped: groups may still come back before that is answered."""
    dropped = step.members_by_state[MemberState.DROPPED].values()
    return any(run.outbox.is_pending(member.drop) for member in dropped)


def _close(run: RunState, step: StepRecord) -> None:
    step.move(StepState.CLOSING)
    num, wanted = len(step.assigned), run.config.groups_per_step
    reason = "full" if num == wanted else f"short: {num} of {wanted} groups, no more can come"
    out = run.outbox
    out.add(CloseStep(command_id=out.new_id(), reason=reason, step=step.step, num_groups=num))
