"""Cells leave rollout and come back (rules 7, 8, 9 and 2.2); which ones, the policy says.

Owns: the test, the stages, abandoning, returning. Must not know: recall's timer, steps' groups.
Invariants: C_R >= w without the leaving cells when they start; the order of stages is the safety
argument of 2.2; one change of routes at a time.
"""

from collections.abc import Sequence
from typing import assert_never

from opengyre.control import recovery
from opengyre.control.bursts import Phase
from opengyre.control.cells import Cell, CellRole, EngineState
from opengyre.control.commands import CloseDoor, EnterTraining, Freeze, LeaveTraining, Reroute
from opengyre.control.errors import InvariantError
from opengyre.control.ids import CommandId
from opengyre.control.reservations import reserve
from opengyre.control.run_state import RunState
from opengyre.control.slots import displace_one, is_rerouting, release_slot, take_slot
from opengyre.control.topology import CORE
from opengyre.control.transition import LeavingStage, Transition

RETRY_AFTER_S = 1.0


def next_cells(run: RunState) -> tuple[Cell, ...]:
    """The cells the policy would take from rollout next, together."""
    revision, cells = run.next_cells
    if revision != run.topology.cells_revision:
        cells = run.policy.next_cells(run.topology)
        run.next_cells = (run.topology.cells_revision, cells)
    return cells


def update_supply(run: RunState, now_s: float) -> None:
    """Rule 7(c): enough ready and unassigned; for the core also the last ones there will be."""
    is_met = is_supplied(run, num_steps=run.burst.num_left)
    if not is_met and run.core.role is CellRole.ROLLOUT:
        is_met = run.groups.num_ready > 0 and run.groups.num_live == 0
    run.supply.update(now_s, is_met=is_met)


def is_supplied(run: RunState, *, num_steps: int, num_coming: int = 0) -> bool:
    """Enough ready groups for the open step, or for the next `num_steps` of the burst; at a
    boundary `num_coming` groups are about to be dispatched."""
    ready, num_wanted = run.groups.num_ready, _num_wanted(run, num_steps, num_coming)
    if run.config.is_streaming:
        ready = min(ready, run.config.groups_per_step - run.num_assigned)
    return ready >= num_wanted


def _num_wanted(run: RunState, num_steps: int, num_coming: int = 0) -> float:
    if run.config.is_streaming:
        return run.config.min_supply_groups
    to_come = run.groups.num_ready + run.groups.num_live + num_coming
    places = num_steps * run.config.groups_per_step - run.num_assigned
    need = min(run.config.groups_per_step, to_come) if run.step is None else run.need
    return max(1, run.policy.whole_supply(step=need, burst=min(places, to_come)))


def why_not(run: RunState, cells: tuple[Cell, ...], now_s: float) -> str | None:
    """In words, the first part of the test that these cells fail; None if they may leave now."""
    verb = "stays" if len(cells) == 1 else "stay"
    name = f"{names(cells)} {verb}"
    for cell in cells:
        state = run.engine_of(cell).state
        if state is not EngineState.OPEN:
            return f"{name}: the engine of {cell.name} is {state.value}"
    if run.executions.displaced:
        return f"{name}: {len(run.executions.displaced)} displaced executions come first"
    remain, w = _remaining(run, cells), run.waterlevel
    if remain < w:
        return f"{name}: w = {w} needs {w} slots, {remain} would remain"
    if not run.supply.is_held(now_s):
        ready, wanted = run.groups.num_ready, _num_wanted(run, run.burst.num_left)
        held = "" if run.supply.since_s is None else f" for {now_s - run.supply.since_s:.1f} s"
        return f"{name}: {ready} of {wanted:g} groups ready{held}"
    if now_s < run.not_before_s:
        return f"{name}: a transition failed a moment ago"
    return None


def names(cells: Sequence[Cell]) -> str:
    """Two and more consecutive cells as a range."""
    if len(cells) == 1:
        return cells[0].name
    return f"cells {cells[0].cell} to {cells[-1].cell}"


def is_moving(run: RunState) -> bool:
    """A transition in either direction is under way; inside a burst only a recalled core waits
    for a checkpoint."""
    is_recalling = run.burst.phase is Phase.RUNNING and run.outbox.is_pending(run.checkpoint)
    return bool(run.transitions) or run.topology.is_moving or is_recalling


def start_next(run: RunState, now_s: float) -> None:
    """Rule 7 at this event; why the next cells stay is kept for the words of the plan."""
    run.why_stays = None
    if run.burst.phase is not Phase.RUNNING or is_moving(run) or run.is_last_step_closing:
        return
    cells = next_cells(run)
    if not cells:
        return
    run.why_stays = why_not(run, cells, now_s)
    if run.why_stays is not None:
        return
    since_s = run.supply.since_s if run.supply.since_s is not None else now_s
    reason = (
        f"w = {run.waterlevel} <= {_remaining(run, cells)} slots left; {run.groups.num_ready} of "
        f"{run.config.groups_per_step} groups ready for {now_s - since_s:.1f} s"
    )
    for cell in cells:
        run.topology.move_cell(cell, CellRole.LEAVING)
        run.topology.move_engine(run.engine_of(cell), EngineState.SHUT)
        words = f"{cell.name} leaves: {reason}"
        out = run.outbox
        command = out.add(CloseDoor(command_id=out.new_id(), reason=words, engine=cell.engine))
        run.transitions[cell.cell] = Transition(
            cell=cell.cell, stage=LeavingStage.CLOSING_DOOR, command=command
        )


def _remaining(run: RunState, cells: tuple[Cell, ...]) -> int:
    return run.capacity - sum(run.engine_of(cell).slots for cell in cells)


def advance(run: RunState, now_s: float) -> None:
    """Goes on from the answered stages; turns back if capacity was lost before the freeze."""
    for transition in tuple(run.transitions.values()):
        if transition.is_before_freeze and run.capacity < run.waterlevel:
            transition.is_abandoned = True
        if not transition.is_answered or is_rerouting(run):
            continue
        transition.is_answered = False
        if transition.failure is not None:
            _stage_failed(run, transition, now_s)
        elif transition.is_abandoned:
            turn_back(run, transition)
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
            run.topology.move_cell(cell, CellRole.TRAINING)
            del run.transitions[cell.cell]
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
    turn_back(run, transition)
    run.not_before_s = now_s + RETRY_AFTER_S


def abandon(run: RunState) -> None:
    """Turn back where nothing was frozen yet, as soon as the command under way is answered."""
    for transition in run.transitions.values():
        if transition.is_before_freeze:
            transition.is_abandoned = True


def turn_back(run: RunState, transition: Transition) -> None:
    """The cell serves on; its door is opened with the next plan."""
    cell = run.cells[transition.cell]
    del run.transitions[cell.cell]
    run.topology.move_cell(cell, CellRole.ROLLOUT)
    run.topology.set_must_return(cell, is_asked=False)


def return_cells(run: RunState) -> None:
    """Cells in training that must return start to."""
    for cell in sorted(run.topology.must_return.values(), key=lambda one: one.cell):
        if cell.role is not CellRole.TRAINING:
            continue
        run.topology.set_must_return(cell, is_asked=False)
        run.topology.move_cell(cell, CellRole.RETURNING)
        version = run.version if cell.cell == CORE else run.published_version
        run.engine_of(cell).due_version = version
        out = run.outbox
        reason = f"{cell.name} returns to rollout with version {version}"
        out.add(
            LeaveTraining(command_id=out.new_id(), reason=reason, cell=cell.cell, version=version)
        )


def returned(run: RunState, cell: Cell, version: int) -> None:
    """Its verified version is `version`; its door is still shut."""
    run.topology.move_cell(cell, CellRole.ROLLOUT)
    run.engine_of(cell).verified_version = version


def enter_bound(run: RunState) -> None:
    """Cells that serve no rollout go straight to training; they have nothing to move."""
    for cell in sorted(run.topology.to_enter.values(), key=lambda one: one.cell):
        is_early = cell.is_fixed and run.burst.phase is not Phase.RUNNING
        if is_early or (cell.is_wanted and run.transitions):
            continue
        why = "it was in training when it died" if cell.is_wanted else "it always trains"
        run.topology.move_cell(cell, CellRole.LEAVING)
        run.topology.set_wanted(cell, is_wanted=False)
        command = _enter_command(run, cell, f"{cell.name} enters: {why}")
        run.transitions[cell.cell] = Transition(
            cell=cell.cell, stage=LeavingStage.ENTERING, command=command
        )


def _reroute(run: RunState, transition: Transition, now_s: float) -> None:
    cell = run.cells[transition.cell]
    engine = run.engine_of(cell)
    if not engine.live:
        _freeze(run, transition)
        return
    destinations = [one for one in run.engines.values() if one.is_serving]
    moves = reserve(tuple(engine.live), destinations)
    if moves is None:
        words = f"{len(engine.live)} executions of {cell.name} do not fit elsewhere"
        if run.config.is_strict and run.capacity >= run.waterlevel:
            raise InvariantError(words)
        turn_back(run, transition)
        run.not_before_s = now_s + RETRY_AFTER_S
        return
    for execution_id, destination in moves:
        execution = run.executions.by_id[execution_id]
        release_slot(run, execution)
        take_slot(run, execution, run.engines[destination])
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
        take_slot(run, execution, source)
