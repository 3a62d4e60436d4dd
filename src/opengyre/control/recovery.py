"""What dies, and what follows from it (rule 10, 2.3.6).

Owns: losing and fencing an engine, the core's redo, recall, the clocks of missing capacity.
Must not know: which slot a displaced execution finds. Invariants: a lost cell leaves the order
until the next boundary; a redo takes the same groups in the same steps.
"""

from collections import deque

from opengyre.control.bursts import Phase
from opengyre.control.cells import Cell, CellRole, Engine, EngineState
from opengyre.control.commands import (
    AbandonStep,
    Admit,
    AnyCommand,
    Checkpoint,
    CloseDoor,
    CloseStep,
    DropMember,
    EnterTraining,
    Expose,
    Fence,
    Freeze,
    LeaveTraining,
    Offer,
    OpenDoor,
    OpenStep,
    Publish,
)
from opengyre.control.groups import Group, GroupState
from opengyre.control.ids import GroupId
from opengyre.control.run_state import RunState
from opengyre.control.slots import displace
from opengyre.control.step_record import MemberState, Redo, StepRecord, StepState
from opengyre.control.topology import CORE

OF_ENGINE = (CloseDoor, Freeze, OpenDoor, Publish)
OF_CELL = (EnterTraining, LeaveTraining, Admit)
OF_CORE = (OpenStep, CloseStep, Offer, Checkpoint, Expose, Admit)


def fence(run: RunState, engine: Engine, why: str) -> None:
    """Its process may still write: it is killed, and lost for us from now on."""
    out = run.outbox
    out.add(Fence(command_id=out.new_id(), reason=why, engine=engine.engine))
    lose(run, engine, why)
    run.is_dirty = True


def fence_suspects(run: RunState) -> None:
    for engine in tuple(run.topology.suspects.values()):
        fence(run, engine, engine.suspicion or "")


def lose(run: RunState, engine: Engine, why: str) -> None:
    """The process is gone: executions are displaced, its commands are answered by nobody."""
    displace(run, engine)
    run.topology.move_engine(engine, EngineState.ABSENT)
    run.topology.clear_suspicion(engine)
    for command in run.outbox.pending():
        if _names(command, engine):
            run.outbox.revoke(command.command_id)
    if engine.cell is not None:
        _lose_cell(run, run.cells[engine.cell], why)


def _names(command: AnyCommand, engine: Engine) -> bool:
    if isinstance(command, OF_ENGINE):
        return command.engine == engine.engine
    if isinstance(command, OF_CELL) and command.cell == engine.cell:
        return True
    return engine.cell == CORE and isinstance(command, OF_CORE)


def _lose_cell(run: RunState, cell: Cell, why: str) -> None:
    run.transitions.pop(cell.cell, None)
    role = cell.role
    run.topology.move_cell(cell, CellRole.ABSENT)
    run.topology.set_must_return(cell, is_asked=False)
    if cell.cell == CORE:
        _lose_core(run, role, why)
        return
    run.topology.set_order(cell, in_order=False)
    drop_member(run, cell.cell, f"{cell.name} died: {why}")


def drop_member(run: RunState, cell: int, reason: str) -> None:
    """The member leaves the open step; the stream is told with the next plan."""
    step = run.step
    member = None if step is None else step.members.get(cell)
    if step is None or member is None or member.state is MemberState.DROPPED:
        return
    run.outbox.revoke(member.admit)
    step.move_member(member, MemberState.DROPPED)
    member.drop_reason = reason


def tell_losses(run: RunState) -> None:
    """DropMember and AbandonStep for what was lost since the last plan."""
    out = run.outbox
    for step, reason in run.steps_to_abandon:
        run.abandon = out.add(AbandonStep(command_id=out.new_id(), reason=reason, step=step))
    run.steps_to_abandon.clear()
    if run.step is None:
        return
    for member in run.step.members_by_state[MemberState.DROPPED].values():
        if member.drop is not None:
            continue
        member.drop = out.add(
            DropMember(
                command_id=out.new_id(),
                reason=member.drop_reason,
                step=run.step.step,
                cell=member.cell,
            )
        )


def abandon_step(run: RunState, reason: str) -> None:
    """The open step is dropped, weights unchanged; its groups are ready and unassigned again."""
    step = run.step
    if step is None:
        return
    run.step = None
    for group in step.assigned.values():
        run.groups.move(group, GroupState.READY)
    run.steps_to_abandon.append((step.step, reason))


def _lose_core(run: RunState, role: CellRole, why: str) -> None:
    """Everything since the last durable checkpoint is redone with the same groups."""
    run.num_core_losses += 1
    has_satellites = bool(run.topology.cells_by_role[CellRole.TRAINING])
    is_training = run.burst.phase in (Phase.RUNNING, Phase.CHECKPOINTING)
    was_wanted = has_satellites or role is CellRole.TRAINING or run.core.is_wanted
    run.topology.set_wanted(run.core, is_wanted=is_training and was_wanted)
    run.checkpoint = run.expose = None
    run.is_exposed = False
    redo = [Redo(groups=one.groups, is_exact=True) for one in run.undurable if one.groups]
    if run.step is not None:
        redo.extend(_redo_of(run.step))
        abandon_step(run, f"the core died: {why}")
    run.redo = deque([*redo, *run.redo])
    _rewind(run)
    if run.num_core_losses > run.config.max_core_losses:
        run.failure = f"the core died {run.num_core_losses} times; the last time: {why}"


def _redo_of(step: StepRecord) -> list[Redo]:
    groups: dict[GroupId, Group] = {group.group: group for group in step.fixed or ()}
    groups.update(step.assigned)
    is_exact = step.is_exact or step.state is StepState.CLOSING
    return [Redo(groups=tuple(groups.values()), is_exact=is_exact)] if groups else []


def _rewind(run: RunState) -> None:
    num_steps = len(run.undurable)
    if run.burst.phase in (Phase.RUNNING, Phase.CHECKPOINTING):
        run.steps_done -= run.burst.num_skipped
        run.num_empty_steps -= run.burst.num_skipped
        run.burst.num_done -= run.burst.num_skipped
        run.burst.num_skipped = 0
    for committed in run.undurable:
        run.num_short_steps -= committed.is_short
        run.num_empty_steps -= not committed.groups
        for group in committed.groups:
            run.groups.move(group, GroupState.READY)
    run.steps_done -= num_steps
    run.burst.num_done -= num_steps
    run.undurable.clear()
    run.version = run.durable_version
    if run.burst.phase is Phase.CHECKPOINTING:
        run.burst.move(Phase.RUNNING)


def watch_capacity(run: RunState, now_s: float) -> None:
    """The clocks of rule 10 and of a run that nothing can move on."""
    capacity = run.capacity
    run.short_since_s = _since(run.short_since_s, now_s, is_true=capacity < run.waterlevel)
    is_lifeless = capacity == 0 < run.waterlevel and not _is_anyone_to_serve(run)
    is_stuck = run.core.role is CellRole.ABSENT or is_lifeless
    run.stuck_since_s = _since(run.stuck_since_s, now_s, is_true=is_stuck)
    since_s, deadline_s = run.stuck_since_s, run.config.lost_deadline_s
    if run.failure is None and since_s is not None and now_s >= since_s + deadline_s:
        what = "the core" if run.core.role is CellRole.ABSENT else "every engine that rolls out"
        run.failure = f"{what} has been gone for {now_s - since_s:.0f} s and was not started again"


def _is_anyone_to_serve(run: RunState) -> bool:
    """A living engine that rolls out now or may come back to it: cells that always train never."""
    alive = (one for one in run.engines.values() if one.state is not EngineState.ABSENT)
    return any(one.cell is None or not run.cells[one.cell].is_fixed for one in alive)


def _since(since_s: float | None, now_s: float, *, is_true: bool) -> float | None:
    if not is_true:
        return None
    return now_s if since_s is None else since_s


def recall(run: RunState, now_s: float) -> None:
    """C_R < w has lasted: the last cell of the prefix goes back to rollout, the core last."""
    if run.burst.phase is not Phase.RUNNING or run.short_since_s is None:
        return
    if not run.policy.can_recall or run.capacity >= run.waterlevel:
        return
    lasted_s = now_s - run.short_since_s
    by_role = run.topology.cells_by_role
    is_about = bool(by_role[CellRole.RETURNING] or by_role[CellRole.LEAVING])
    is_early = now_s < run.short_since_s + run.config.recall_after_s
    if is_early or is_about or run.is_last_step_closing:
        return
    last = max(by_role[CellRole.TRAINING], default=None)
    if last is None or run.cells[last].must_return:
        return
    cell = run.cells[last]
    reason = (
        f"{cell.name} is recalled: w = {run.waterlevel} > {run.capacity} slots for {lasted_s:.0f} s"
    )
    if cell.cell == CORE:
        _recall_core(run, reason)
        return
    run.topology.set_must_return(cell, is_asked=True)
    drop_member(run, cell.cell, reason)
    tell_losses(run)


def _recall_core(run: RunState, reason: str) -> None:
    """Committed steps of the burst become durable first: the core then serves their version."""
    if run.step is not None and run.step.state is not StepState.OPEN:
        return
    if run.outbox.is_pending(run.checkpoint):
        return
    if run.step is not None and run.step.fixed is not None:
        run.redo.appendleft(Redo(groups=run.step.fixed, is_exact=run.step.is_exact))
    abandon_step(run, reason)
    tell_losses(run)
    if not run.undurable:
        run.topology.set_must_return(run.core, is_asked=True)
        return
    out = run.outbox
    last = run.undurable[-1].step
    run.checkpoint = out.add(
        Checkpoint(command_id=out.new_id(), reason=reason, step=last, version=run.version)
    )
