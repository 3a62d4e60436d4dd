"""What each fact changes. No command is given here; `decide` gives them.

Owns: refusing what is late, doubled or fenced; believing the rest. Must not know: plans.
Invariants: a refused fact changes nothing but its count; an impossible one raises.
"""

from typing import assert_never

from opengyre.control import answers, members, recovery, steps
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.errors import InvariantError
from opengyre.control.executions import ExecutionState
from opengyre.control.facts import (
    CommandApplied,
    CommandFailed,
    CommandUnknown,
    EngineLost,
    EngineReady,
    ExecutionClosed,
    Fact,
    GroupAssigned,
    GroupReturned,
    MemberAdmitted,
    StepCommitted,
    StopRequested,
    VerdictGiven,
)
from opengyre.control.groups import Group, GroupState
from opengyre.control.run_state import RunState
from opengyre.control.step_record import MemberState, StepRecord, StepState
from opengyre.control.topology import CORE


def take(run: RunState, fact: Fact, now_s: float) -> None:
    match fact:
        case CommandApplied() | CommandFailed() | CommandUnknown():
            answers.take(run, fact, now_s)
        case ExecutionClosed() | VerdictGiven():
            _take_execution(run, fact)
        case EngineReady():
            _engine_ready(run, fact)
        case EngineLost():
            _engine_lost(run, fact)
        case GroupAssigned() | GroupReturned() | MemberAdmitted() | StepCommitted():
            _take_step(run, fact)
        case StopRequested():
            run.stop_reason = run.stop_reason or fact.reason
        case _:
            assert_never(fact)


def _take_execution(run: RunState, fact: ExecutionClosed | VerdictGiven) -> None:
    book = run.executions
    if not book.is_known(fact.execution):
        raise InvariantError(f"{fact.execution} was never dispatched")
    execution = book.by_id.get(fact.execution)
    if execution is None:
        run.refuse("an execution that is over")
        return
    if execution.state is ExecutionState.QUEUED:
        raise InvariantError(f"{fact.execution} was never launched")
    if isinstance(fact, VerdictGiven):
        if execution.has_last_word:
            run.refuse("a second verdict")
            return
        members.give_verdict(run, execution, value=fact.value)
        return
    if execution.state is ExecutionState.CLOSED:
        run.refuse("a second outcome")
        return
    members.close(run, execution, fact.outcome)


def _engine_ready(run: RunState, fact: EngineReady) -> None:
    engine = run.engines.get(fact.engine)
    if engine is None:
        raise InvariantError(f"{fact.engine} is not in the config")
    if fact.incarnation <= engine.incarnation:
        run.refuse("an older incarnation")
        return
    if engine.state is not EngineState.ABSENT:
        recovery.lose(run, engine, f"incarnation {fact.incarnation} took its place")
    if fact.version > run.version:
        raise InvariantError(f"{fact.engine} serves version {fact.version}, never published")
    engine.incarnation, engine.has_reported = fact.incarnation, True
    engine.verified_version = engine.due_version = fact.version
    run.topology.move_engine(engine, EngineState.SHUT)
    if engine.cell is None:
        return
    run.topology.move_cell(run.cells[engine.cell], CellRole.ROLLOUT)
    if engine.cell == CORE and fact.version != run.durable_version and run.failure is None:
        run.failure = (
            f"the core came back with version {fact.version}; "
            f"the last durable one is {run.durable_version}"
        )


def _engine_lost(run: RunState, fact: EngineLost) -> None:
    engine = run.engines.get(fact.engine)
    if engine is None:
        raise InvariantError(f"{fact.engine} is not in the config")
    if fact.incarnation < engine.incarnation or fact.incarnation <= engine.lost_incarnation:
        run.refuse("an older incarnation")
        return
    engine.incarnation, engine.has_reported = fact.incarnation, True
    engine.lost_incarnation = fact.incarnation
    if engine.state is not EngineState.ABSENT:
        recovery.lose(run, engine, fact.reason)


def _take_step(
    run: RunState, fact: GroupAssigned | GroupReturned | MemberAdmitted | StepCommitted
) -> None:
    step = run.step
    if step is None or step.step != fact.step:
        run.refuse("a step that is not open")
        return
    match fact:
        case GroupAssigned() | GroupReturned():
            _take_group(run, step, fact)
        case MemberAdmitted():
            member = step.members.get(fact.cell)
            if member is None or member.state is not MemberState.ADMITTING:
                run.refuse("a member that was dropped or has joined")
                return
            step.move_member(member, MemberState.ADMITTED)
        case StepCommitted():
            if step.state is not StepState.CLOSING:
                raise InvariantError(f"step {fact.step} was committed while {step.state.value}")
            if fact.version not in (step.version, step.version + 1):
                raise InvariantError(f"step {fact.step} made version {fact.version}")
            steps.committed(run, step, fact.version)
        case _:
            assert_never(fact)


def _take_group(run: RunState, step: StepRecord, fact: GroupAssigned | GroupReturned) -> None:
    group = run.groups.by_id.get(fact.group)
    if group is None:
        if not run.executions.is_group_known(fact.group):
            raise InvariantError(f"{fact.group} was never dispatched")
        run.refuse("a group that is over")
    elif isinstance(fact, GroupAssigned):
        _assign(run, step, group)
    elif fact.group not in step.assigned:
        run.refuse("a group that is not assigned")
    elif step.state is not StepState.OPEN:
        run.refuse("a group of a step that closes")
    else:
        del step.assigned[group.group]
        step.offered[group.group] = group
        run.groups.move(group, GroupState.READY)


def _assign(run: RunState, step: StepRecord, group: Group) -> None:
    if group.group in step.assigned:
        run.refuse("a group that is assigned")
        return
    if group.group not in step.offered:
        raise InvariantError(f"{group.group} was assigned but not offered in step {step.step}")
    del step.offered[group.group]
    step.told.pop(group.group, None)
    step.assigned[group.group] = group
    run.groups.move(group, GroupState.ASSIGNED)
