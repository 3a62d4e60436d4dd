"""Lifecycle tables, counts, the supply timer, reservations, the config's bounds."""

import pytest

from opengyre.control.bursts import Burst, Phase
from opengyre.control.cells import Cell, CellRole, Engine, EngineState
from opengyre.control.config import EngineSpec, SchedulerConfig
from opengyre.control.counts import Counts
from opengyre.control.errors import InvariantError
from opengyre.control.executions import EXECUTION_TRANSITIONS, Execution, ExecutionState
from opengyre.control.groups import GROUP_TRANSITIONS, Group, GroupBook, GroupState
from opengyre.control.ids import (
    EngineId,
    ExecutionId,
    GroupId,
    cell_engine_id,
    execution_id,
    standalone_engine_id,
)
from opengyre.control.reservations import reserve
from opengyre.control.supply import SupplyTimer


def make_group(number: int = 0, *, version: int = 0, num_open: int = 2) -> Group:
    return Group(
        group=GroupId(f"g{number}"), number=number, version=version, members=(), num_open=num_open
    )


def make_engine(name: str, *, slots: int, cell: int | None, stay: int) -> Engine:
    return Engine(engine=EngineId(name), slots=slots, cell=cell, number=0, stay=stay)


def test_counts_refuse_more_finished_than_launched() -> None:
    counts = Counts()
    counts.add_dispatched(1)
    with pytest.raises(InvariantError, match="f <= p <= d"):
        counts.add_finished()


def test_counts_give_queued_running_and_waterlevel() -> None:
    counts = Counts(dispatched=5, launched=3, finished=1)
    assert (counts.queued, counts.running, counts.waterlevel) == (2, 2, 4)


@pytest.mark.parametrize("state", list(GroupState))
def test_a_group_moves_only_along_its_table(state: GroupState) -> None:
    for target in GroupState:
        book, group = GroupBook(), make_group()
        group.state = state
        book.add(group)
        if target in GROUP_TRANSITIONS[state]:
            book.move(group, target)
            assert book.num_by_state[target] == 1
        else:
            with pytest.raises(InvariantError):
                book.move(group, target)


@pytest.mark.parametrize("state", list(ExecutionState))
def test_an_execution_moves_only_along_its_table(state: ExecutionState) -> None:
    for target in ExecutionState:
        execution = Execution(execution=ExecutionId("e000000"), group=None, state=state)
        if target in EXECUTION_TRANSITIONS[state]:
            execution.move(target)
        else:
            with pytest.raises(InvariantError):
                execution.move(target)


def test_a_cell_cannot_train_without_leaving_rollout_first() -> None:
    cell = Cell(cell=1, engine=cell_engine_id(1), role=CellRole.ROLLOUT)
    with pytest.raises(InvariantError, match="cell 1: rollout -> training"):
        cell.move(CellRole.TRAINING)


def test_an_absent_engine_cannot_open() -> None:
    engine = make_engine("s0", slots=1, cell=None, stay=0)
    with pytest.raises(InvariantError, match="s0: absent -> open"):
        engine.move(EngineState.OPEN)


def test_a_run_that_ended_never_goes_on() -> None:
    with pytest.raises(InvariantError, match="ended -> running"):
        Burst(phase=Phase.ENDED).move(Phase.RUNNING)


def test_a_group_is_ready_with_enough_verdicts_and_void_with_fewer() -> None:
    book = GroupBook()
    ready, void = make_group(0), make_group(1)
    book.add(ready)
    book.add(void)
    for value in (1.0, 1.0):
        book.member_done(ready, value=value, min_valid=2, is_filtering=False)
    for one in (1.0, None):
        book.member_done(void, value=one, min_valid=2, is_filtering=False)
    assert (ready.state, void.state) == (GroupState.READY, GroupState.VOID)
    assert (book.num_void_in_a_row, book.num_outstanding) == (1, 1)


def test_supply_is_held_only_while_it_stays_true() -> None:
    timer = SupplyTimer(hold_s=1.0)
    timer.update(0.0, is_met=True)
    assert not timer.is_held(0.9)
    timer.update(0.95, is_met=False)
    timer.update(1.0, is_met=True)
    assert not timer.is_held(1.9)
    assert timer.is_held(2.0)


def test_supply_starts_again_when_a_step_opens() -> None:
    timer = SupplyTimer(hold_s=1.0)
    timer.update(0.0, is_met=True)
    timer.restart()
    timer.update(5.0, is_met=True)
    assert not timer.is_held(5.5)


def test_reservations_go_to_the_freest_standalone_first_then_to_the_last_cell() -> None:
    engines = [
        make_engine("c1", slots=2, cell=1, stay=9),
        make_engine("c2", slots=1, cell=2, stay=8),
        make_engine("s0", slots=1, cell=None, stay=0),
        make_engine("s1", slots=2, cell=None, stay=1),
    ]
    moves = reserve([execution_id(n) for n in range(6)], engines)
    assert moves is not None
    assert [engine for _, engine in moves] == ["s1", "s0", "s1", "c2", "c1", "c1"]


def test_reservations_that_do_not_fit_are_refused_as_a_whole() -> None:
    engines = [make_engine("s0", slots=1, cell=None, stay=0)]
    assert reserve([execution_id(0), execution_id(1)], engines) is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"supply_fraction": 0.6}, "supply_fraction"),
        ({"supply_fraction": 0.0}, "supply_fraction"),
        ({"max_staleness": 1, "run_ahead": 1, "steps_per_burst": 2}, "max_staleness"),
        ({"num_cells": 2}, "exactly one engine"),
        ({"num_steps": 0}, "num_steps"),
    ],
)
def test_a_config_out_of_bounds_is_refused(numbers: dict[str, float], words: str) -> None:
    engines = (
        EngineSpec(engine=cell_engine_id(0), slots=4, cell=0),
        EngineSpec(engine=standalone_engine_id(0), slots=4, cell=None),
    )
    defaults = {"num_cells": 1, "engines": engines, "num_steps": 4}
    with pytest.raises(InvariantError, match=words):
        SchedulerConfig(**{**defaults, **numbers})  # type: ignore[arg-type]
