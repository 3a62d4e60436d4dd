"""The transition tables of `control/`: everything reachable, ends as stated, the rest refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from opengyre.control.bursts import PHASE_TRANSITIONS, Burst, Phase
from opengyre.control.cells import (
    CELL_TRANSITIONS,
    ENGINE_TRANSITIONS,
    Cell,
    CellRole,
    Engine,
    EngineState,
)
from opengyre.control.errors import InvariantError
from opengyre.control.executions import EXECUTION_TRANSITIONS, Execution, ExecutionState
from opengyre.control.groups import GROUP_TRANSITIONS, Group, GroupBook, GroupState
from opengyre.control.ids import CommandId, EngineId, ExecutionId, GroupId
from opengyre.control.step_record import (
    MEMBER_TRANSITIONS,
    STEP_TRANSITIONS,
    Member,
    MemberState,
    StepRecord,
    StepState,
)
from opengyre.control.transition import LEAVING_TRANSITIONS, LeavingStage, Transition


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """`is_moved(before, after)` puts a record into `before`, moves it, and says if it got there.
    `ends` are the states nothing leaves."""

    states: type[Enum]
    table: Mapping[Any, frozenset[Any]]
    first: Enum
    ends: frozenset[Enum]
    is_moved: Callable[[Any, Any], bool]


def move_cell(before: CellRole, after: CellRole) -> bool:
    cell = Cell(cell=1, engine=EngineId("c1"), role=before)
    cell.move(after)
    return cell.role is after


def move_engine(before: EngineState, after: EngineState) -> bool:
    engine = Engine(engine=EngineId("s0"), slots=1, cell=None, number=0, stay=0, state=before)
    engine.move(after)
    return engine.state is after


def move_execution(before: ExecutionState, after: ExecutionState) -> bool:
    execution = Execution(execution=ExecutionId("e000000"), group=None, state=before)
    execution.move(after)
    return execution.state is after


def move_group(before: GroupState, after: GroupState) -> bool:
    """Through the book, whose counts must follow."""
    book = GroupBook()
    group = Group(
        group=GroupId("g00000"), number=0, version=0, members=(), num_open=0, state=before
    )
    book.add(group)
    book.move(group, after)
    return group.state is after and book.num_by_state[after] == 1


def move_step(before: StepState, after: StepState) -> bool:
    step = StepRecord(step=1, version=0, fixed=None, is_exact=False, state=before)
    step.move(after)
    return step.state is after


def move_member(before: MemberState, after: MemberState) -> bool:
    member = Member(cell=1, deadline_s=0.0, admit=CommandId(1), state=before)
    member.move(after)
    return member.state is after


def move_phase(before: Phase, after: Phase) -> bool:
    burst = Burst(phase=before)
    burst.move(after)
    return burst.phase is after


def move_leaving(before: LeavingStage, after: LeavingStage) -> bool:
    leaving = Transition(cell=1, stage=before, command=CommandId(1))
    leaving.move(after, CommandId(2))
    return leaving.stage is after and leaving.command == 2


LIFECYCLES = {
    "cell": Lifecycle(
        states=CellRole,
        table=CELL_TRANSITIONS,
        first=CellRole.ABSENT,
        ends=frozenset(),
        is_moved=move_cell,
    ),
    "engine": Lifecycle(
        states=EngineState,
        table=ENGINE_TRANSITIONS,
        first=EngineState.ABSENT,
        ends=frozenset(),
        is_moved=move_engine,
    ),
    "execution": Lifecycle(
        states=ExecutionState,
        table=EXECUTION_TRANSITIONS,
        first=ExecutionState.QUEUED,
        ends=frozenset({ExecutionState.CLOSED}),
        is_moved=move_execution,
    ),
    "group": Lifecycle(
        states=GroupState,
        table=GROUP_TRANSITIONS,
        first=GroupState.LIVE,
        ends=frozenset({GroupState.VOID, GroupState.FILTERED, GroupState.DROPPED}),
        is_moved=move_group,
    ),
    "step": Lifecycle(
        states=StepState,
        table=STEP_TRANSITIONS,
        first=StepState.OPENING,
        ends=frozenset({StepState.CLOSING}),
        is_moved=move_step,
    ),
    "member": Lifecycle(
        states=MemberState,
        table=MEMBER_TRANSITIONS,
        first=MemberState.ADMITTING,
        ends=frozenset({MemberState.DROPPED}),
        is_moved=move_member,
    ),
    "phase": Lifecycle(
        states=Phase,
        table=PHASE_TRANSITIONS,
        first=Phase.STARTING,
        ends=frozenset({Phase.ENDED}),
        is_moved=move_phase,
    ),
    "leaving": Lifecycle(
        states=LeavingStage,
        table=LEAVING_TRANSITIONS,
        first=LeavingStage.CLOSING_DOOR,
        ends=frozenset({LeavingStage.ENTERING}),
        is_moved=move_leaving,
    ),
}
every_lifecycle = pytest.mark.parametrize("name", LIFECYCLES)


def reachable(table: Mapping[Any, frozenset[Any]], first: Enum) -> set[Enum]:
    found, new = {first}, [first]
    while new:
        fresh = sorted(table[new.pop()] - found, key=lambda state: state.name)
        found.update(fresh)
        new.extend(fresh)
    return found


@every_lifecycle
def test_every_state_has_a_row_and_is_reached_from_the_first(name: str) -> None:
    life = LIFECYCLES[name]
    assert set(life.table) == set(life.states)
    assert reachable(life.table, life.first) == set(life.states)


@every_lifecycle
def test_the_ends_are_the_stated_ones_and_one_is_reached_from_everywhere(name: str) -> None:
    life = LIFECYCLES[name]
    assert {state for state, after in life.table.items() if not after} == life.ends
    for state in life.states if life.ends else ():
        assert reachable(life.table, state) & life.ends, f"{state} never ends"


@every_lifecycle
def test_listed_transitions_are_taken_and_all_others_are_our_own_fault(name: str) -> None:
    life = LIFECYCLES[name]
    for before in life.states:
        for after in life.states:
            if after in life.table[before]:
                assert life.is_moved(before, after)
                continue
            with pytest.raises(InvariantError, match=f"{before.value} -> {after.value}"):
                life.is_moved(before, after)


def test_a_cell_and_an_engine_may_die_in_every_state_and_come_back() -> None:
    for role, after in CELL_TRANSITIONS.items():
        assert role is CellRole.ABSENT or CellRole.ABSENT in after
        assert reachable(CELL_TRANSITIONS, role) == set(CellRole)
    for state, next_states in ENGINE_TRANSITIONS.items():
        assert state is EngineState.ABSENT or EngineState.ABSENT in next_states
        assert reachable(ENGINE_TRANSITIONS, state) == set(EngineState)


def test_training_is_entered_and_left_only_through_the_transitions_of_the_design() -> None:
    into = [role for role, after in CELL_TRANSITIONS.items() if CellRole.TRAINING in after]
    assert into == [CellRole.LEAVING]
    assert CELL_TRANSITIONS[CellRole.TRAINING] == {CellRole.RETURNING, CellRole.ABSENT}


def test_the_run_may_end_early_from_every_phase() -> None:
    over = {Phase.ENDING, Phase.ENDED}
    assert all(Phase.ENDING in PHASE_TRANSITIONS[one] for one in Phase if one not in over)


def test_only_a_cores_death_brings_a_consumed_group_back() -> None:
    assert GROUP_TRANSITIONS[GroupState.CONSUMED] == {GroupState.READY}
    into = [state for state, after in GROUP_TRANSITIONS.items() if GroupState.CONSUMED in after]
    assert into == [GroupState.ASSIGNED]
