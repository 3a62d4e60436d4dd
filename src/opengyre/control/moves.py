"""Cells leave rollout one at a time and come back (rules 7, 8, 9 and 2.2).

Owns: the test, the stages, abandoning, returning. Must not know: recall's timer, steps' groups.
Invariants: C_R >= w without the leaving cell when it starts; the order of stages is the safety
argument of 2.2; the training set grows by the next cell in order.
"""

from typing import assert_never

from opengyre.control import recovery
from opengyre.control.bursts import Phase
from opengyre.control.cells import Cell, CellRole, EngineState
from opengyre.control.commands import CloseDoor, EnterTraining, Freeze, LeaveTraining, Reroute
from opengyre.control.errors import InvariantError
from opengyre.control.ids import CommandId
from opengyre.control.reservations import reserve
from opengyre.control.run_state import CORE, RunState
from opengyre.control.slots import displace_one, is_rerouting, release_slot, take_slot
from opengyre.control.transition import LeavingStage, Transition

RETRY_AFTER_S = 1.0


def next_cell(run: RunState) -> Cell | None:
    """The next cell in order that serves rollout; satellites follow a core in training."""
    for cell in run.cells:
        if not cell.in_order or cell.role is CellRole.ABSENT:
            if cell.cell == CORE:
                return None
            continue
        if cell.role is CellRole.TRAINING and not cell.must_return:
            continue
        return cell if cell.role is CellRole.ROLLOUT else None
    return None


def update_supply(run: RunState, now_s: float) -> None:
    """Rule 7(c): enough ready and unassigned; for the core also the last ones there will be."""
    ready, config = run.groups.num_ready, run.config
    is_met = min(ready, config.groups_per_step - run.num_assigned) >= config.min_supply_groups
    if not is_met and run.core.role is CellRole.ROLLOUT:
        is_met = ready > 0 and run.groups.num_live == 0
    run.supply.update(now_s, is_met=is_met)


def why_not(run: RunState, cell: Cell, now_s: float) -> str | None:
    """In words, the first part of the test that `cell` fails; None if it may leave now."""
    engine = run.engine_of(cell)
    name = cell.name
    if engine.state is not EngineState.OPEN:
        return f"{name} stays: its engine is {engine.state.value}"
    if run.executions.displaced:
        return f"{cell.name} stays: {len(run.executions.displaced)} displaced executions come first"
    remain, w = run.capacity - engine.slots, run.waterlevel
    if remain < w:
        return f"{name} stays: w = {w} needs {w} slots, {remain} would remain"
    if not run.supply.is_held(now_s):
        ready, wanted = run.groups.num_ready, run.config.min_supply_groups
        held = "" if run.supply.since_s is None else f" for {now_s - run.supply.since_s:.1f} s"
        return f"{name} stays: {ready} of {wanted:g} groups ready{held}"
    if now_s < run.not_before_s:
        return f"{name} stays: its last transition was abandoned"
    return None


def is_moving(run: RunState) -> bool:
    """A transition in either direction is under way."""
    if run.transition is not None:
        return True
    return any(cell.must_return or cell.role is CellRole.RETURNING for cell in run.cells)


def start_next(run: RunState, now_s: float) -> None:
    """Rule 7 at this event; why the next cell stays is kept for the words of the plan."""
    run.why_stays = None
    if run.burst.phase is not Phase.RUNNING or is_moving(run) or run.is_last_step_closing:
        return
    cell = next_cell(run)
    if cell is None:
        return
    run.why_stays = why_not(run, cell, now_s)
    if run.why_stays is not None:
        return
    engine = run.engine_of(cell)
    since_s = run.supply.since_s if run.supply.since_s is not None else now_s
    reason = (
        f"{cell.name} leaves: w = {run.waterlevel} <= {run.capacity - engine.slots} slots left; "
        f"{run.groups.num_ready} of {run.config.groups_per_step} groups ready "
        f"for {now_s - since_s:.1f} s"
    )
    cell.move(CellRole.LEAVING)
    engine.move(EngineState.SHUT)
    out = run.outbox
    command = out.add(CloseDoor(command_id=out.new_id(), reason=reason, engine=engine.engine))
    run.transition = Transition(cell=cell.cell, stage=LeavingStage.CLOSING_DOOR, command=command)


def advance(run: RunState, now_s: float) -> None:
    """Goes on from the answered stage; turns back if capacity was lost before the freeze."""
    transition = run.transition
    if transition is None:
        return
    if transition.is_before_freeze and run.capacity < run.waterlevel:
        abandon(run)
    transition = run.transition
    if transition is None or not transition.is_answered or is_rerouting(run):
        return
    transition.is_answered = False
    if transition.failure is not None:
        _stage_failed(run, transition, now_s)
    elif transition.is_abandoned:
        turn_back(run, now_s)
    else:
        _stage_applied(run, transition, now_s)


def _stage_applied(run: RunState, transition: Transition, now_s: float) -> None:
    match transition.stage:
        case LeavingStage.CLOSING_DOOR:
            _reroute(run, transition, now_s)
        case LeavingStage.REROUTING:
            _freeze(run, transition)
        case LeavingStage.FREEZING:
            _enter(run, transition)
        case LeavingStage.ENTERING:
            cell = run.cells[transition.cell]
            cell.move(CellRole.TRAINING)
            run.transition = None
        case _:
            assert_never(transition.stage)


def _stage_failed(run: RunState, transition: Transition, now_s: float) -> None:
    """Before the freeze the cell turns back; from the freeze on it is suspect and fenced."""
    if not transition.is_before_freeze:
        cell = run.cells[transition.cell]
        why = f"{cell.name} failed at {transition.stage.value}: {transition.failure}"
        recovery.fence(run, run.engine_of(cell), why)
        return
    if transition.stage is LeavingStage.REROUTING:
        _undo_moves(run, transition)
    turn_back(run, now_s)


def abandon(run: RunState) -> None:
    """Turn back if nothing was frozen yet, as soon as the command under way is answered."""
    if run.transition is not None and run.transition.is_before_freeze:
        run.transition.is_abandoned = True


def turn_back(run: RunState, now_s: float) -> None:
    """The cell serves on; its door is opened with the next plan."""
    if run.transition is None:
        raise InvariantError("nothing to turn back")
    cell = run.cells[run.transition.cell]
    cell.move(CellRole.ROLLOUT)
    cell.must_return = False
    run.transition = None
    run.supply.restart()
    run.not_before_s = now_s + RETRY_AFTER_S


def return_cells(run: RunState) -> None:
    """Cells in training that must return start to."""
    for cell in run.cells:
        if not cell.must_return or cell.role is not CellRole.TRAINING:
            continue
        cell.must_return = False
        cell.move(CellRole.RETURNING)
        version = run.version if cell.cell == CORE else run.published_version
        run.engine_of(cell).due_version = version
        out = run.outbox
        reason = f"{cell.name} returns to rollout with version {version}"
        out.add(
            LeaveTraining(command_id=out.new_id(), reason=reason, cell=cell.cell, version=version)
        )


def returned(run: RunState, cell: Cell, version: int) -> None:
    """Its verified version is `version`; its door is still shut."""
    cell.move(CellRole.ROLLOUT)
    run.engine_of(cell).verified_version = version


def enter_again(run: RunState) -> None:
    """A restarted core goes straight back to training; it has nothing to move."""
    cell = run.core
    if not run.is_core_wanted or cell.role is not CellRole.ROLLOUT or run.transition is not None:
        return
    run.is_core_wanted = False
    cell.move(CellRole.LEAVING)
    command = _enter_command(run, cell, "the core was in training when it died")
    run.transition = Transition(cell=cell.cell, stage=LeavingStage.ENTERING, command=command)


def _reroute(run: RunState, transition: Transition, now_s: float) -> None:
    cell = run.cells[transition.cell]
    engine = run.engine_of(cell)
    if not engine.live:
        _freeze(run, transition)
        return
    destinations = [one for one in run.engines.values() if run.serves(one)]
    moves = reserve(tuple(engine.live), destinations)
    if moves is None:
        words = f"{len(engine.live)} executions of {cell.name} do not fit elsewhere"
        if run.config.is_strict and run.capacity >= run.waterlevel:
            raise InvariantError(words)
        turn_back(run, now_s)
        return
    for execution_id, destination in moves:
        execution = run.executions.by_id[execution_id]
        release_slot(run, execution)
        take_slot(execution, run.engines[destination])
    out = run.outbox
    reason = f"{len(moves)} live executions move off {cell.name}"
    command = out.add(Reroute(command_id=out.new_id(), reason=reason, moves=moves))
    run.reroute = command
    transition.moves = moves
    transition.move(LeavingStage.REROUTING, command)


def _freeze(run: RunState, transition: Transition) -> None:
    cell = run.cells[transition.cell]
    out = run.outbox
    reason = f"{cell.name} stops writing at token boundaries"
    command = out.add(Freeze(command_id=out.new_id(), reason=reason, engine=cell.engine))
    transition.move(LeavingStage.FREEZING, command)


def _enter(run: RunState, transition: Transition) -> None:
    cell = run.cells[transition.cell]
    reason = f"nothing runs on {cell.name} any more"
    transition.move(LeavingStage.ENTERING, _enter_command(run, cell, reason))


def _enter_command(run: RunState, cell: Cell, reason: str) -> CommandId:
    out = run.outbox
    return out.add(EnterTraining(command_id=out.new_id(), reason=reason, cell=cell.cell))


def _undo_moves(run: RunState, transition: Transition) -> None:
    """Failed: no route was changed, so they sit at the source again. Unknown: placed anew."""
    source = run.engine_of(run.cells[transition.cell])
    for execution_id, destination in transition.moves:
        execution = run.executions.unfinished.get(execution_id)
        if execution is None or execution.engine != destination:
            continue
        if transition.is_unknown:
            displace_one(run, execution)
            continue
        release_slot(run, execution)
        take_slot(execution, source)
