"""What the answer to a command changes: applied, failed, unknown.

Owns: the meaning of each answer. Must not know: what is commanded next.
Invariants: an answer to a command that was answered or revoked is refused; a process whose
effect is unknown is suspect.
"""

from typing import assert_never

from opengyre.control import boundary, members, moves, publication
from opengyre.control import commands as c
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.errors import InvariantError
from opengyre.control.facts import CommandApplied, CommandFailed, CommandUnknown, Outcome
from opengyre.control.ids import EngineId
from opengyre.control.recovery import drop_member
from opengyre.control.run_state import RunState
from opengyre.control.slots import displace_one
from opengyre.control.step_record import StepState
from opengyre.control.transition import Transition

REROUTE_RETRY_S = 1.0
MAX_DROP_FAILURES = 4
STAGES = (c.CloseDoor, c.Reroute, c.Freeze, c.EnterTraining)


def take(
    run: RunState, fact: CommandApplied | CommandFailed | CommandUnknown, now_s: float
) -> None:
    if not 0 < fact.command_id <= run.outbox.num_issued:
        raise InvariantError(f"command {fact.command_id} was never given")
    command = run.outbox.answer(fact.command_id)
    if command is None:
        run.refuse("a command that was answered or revoked")
        return
    transition = _transition_of(run, command)
    if transition is not None:
        transition.is_answered = True
        if not isinstance(fact, CommandApplied):
            transition.failure = fact.reason
            transition.is_unknown = isinstance(fact, CommandUnknown)
        return
    if isinstance(fact, CommandApplied):
        _applied(run, command)
    else:
        _failed(run, command, fact, now_s)


def _transition_of(run: RunState, command: c.AnyCommand) -> Transition | None:
    """The transition whose stage this command is."""
    if not isinstance(command, STAGES):
        return None
    found = (one for one in run.transitions.values() if one.command == command.command_id)
    return next(found, None)


def _applied(run: RunState, command: c.AnyCommand) -> None:
    match command:
        case c.OpenDoor():
            engine = run.engines[command.engine]
            if engine.state is EngineState.OPENING:
                run.topology.move_engine(engine, EngineState.OPEN)
        case c.Publish():
            publication.published(run, run.engines[command.engine], command.version)
        case c.LeaveTraining():
            moves.returned(run, run.cells[command.cell], command.version)
        case c.OpenStep():
            if run.step is not None and run.step.step == command.step:
                run.step.move(StepState.OPEN)
                run.supply.restart()
        case c.Checkpoint():
            boundary.checkpointed(run)
        case c.Expose():
            run.is_exposed = True
        case _:
            return


def _failed(
    run: RunState,
    command: c.AnyCommand,
    fact: CommandFailed | CommandUnknown,
    now_s: float,
) -> None:
    match command:
        case c.Launch():
            if isinstance(fact, CommandFailed):
                _launch_failed(run, command)
        case c.Reroute():
            _reroute_failed(run, command, now_s)
        case c.OpenDoor() | c.Publish():
            _suspect(run, command.engine, command, fact.reason)
        case c.LeaveTraining():
            _suspect(run, run.cells[command.cell].engine, command, fact.reason)
        case c.OpenStep() | c.CloseStep() | c.Expose():
            _suspect(run, run.core.engine, command, fact.reason)
        case c.Checkpoint() if isinstance(fact, CommandUnknown):
            _suspect(run, run.core.engine, command, fact.reason)
        case c.DispatchGroups() | c.DispatchEval() | c.Checkpoint():
            _fail_run(run, command, fact.reason)
        case c.Admit() | c.DropMember() | c.Offer():
            _step_call_failed(run, command, fact.reason)
        case _:
            return


def _step_call_failed(
    run: RunState, command: c.Admit | c.DropMember | c.Offer, reason: str
) -> None:
    is_now = run.step is not None and run.step.step == command.step
    match command:
        case c.Admit():
            if is_now:
                drop_member(run, command.cell, f"it could not join: {reason}")
        case c.DropMember():
            if run.cells[command.cell].role is CellRole.TRAINING:
                _suspect(run, run.cells[command.cell].engine, command, reason)
            if is_now:
                _drop_again(run, command, reason)
        case c.Offer():
            if is_now:
                _fail_run(run, command, reason)
        case _:
            assert_never(command)


def _drop_again(run: RunState, command: c.DropMember, reason: str) -> None:
    """Its work must come back to the stream, or the step never ends: told again, boundedly."""
    member = None if run.step is None else run.step.members.get(command.cell)
    if member is None:
        return
    member.num_drop_failures += 1
    member.drop = None
    if member.num_drop_failures >= MAX_DROP_FAILURES:
        _fail_run(run, command, reason)


def _launch_failed(run: RunState, command: c.Launch) -> None:
    """A launch that fails is a finish without a verdict."""
    execution = run.executions.unfinished.get(command.execution)
    if execution is None:
        return
    execution.has_last_word = True
    members.close(run, execution, Outcome.FAILED)


def _reroute_failed(run: RunState, command: c.Reroute, now_s: float) -> None:
    """Who still counts on the new route is displaced again, and placed a little later."""
    run.reroute_not_before_s = now_s + REROUTE_RETRY_S
    for execution_id, destination in command.moves:
        execution = run.executions.unfinished.get(execution_id)
        if execution is None or execution.engine != destination:
            continue
        displace_one(run, execution)


def _suspect(run: RunState, engine_id: EngineId, command: c.AnyCommand, reason: str) -> None:
    run.topology.suspect(run.engines[engine_id], f"{type(command).__name__} failed: {reason}")


def _fail_run(run: RunState, command: c.AnyCommand, reason: str) -> None:
    if run.failure is None:
        run.failure = f"{type(command).__name__} failed: {reason}"
