"""Executions over engines: what a move, a publication, a death and a return cost."""

from dataclasses import replace

import pytest

from opengyre.control.facts import ExecutionClosed, Fact, Outcome, VerdictGiven
from opengyre.control.ids import EngineId, execution_id, group_id
from opengyre.simulate.accounts import Account, Books
from opengyre.simulate.costs import Costs, EngineCosts, GraderCosts, ToolCosts, TrainingCosts
from opengyre.simulate.fleet import Fleet, FleetParts
from opengyre.simulate.kernel import Kernel
from opengyre.simulate.result import Mode
from opengyre.simulate.rollout import RolloutEngine
from opengyre.simulate.workload import LognormalWorkload

SOURCE, TARGET = EngineId("c0"), EngineId("c1")
# Every execution lasts 1000 s, is in a model call, and carries 100 tokens: 10 s to recompute, 1 s
# to read.
COSTS = Costs(
    training=TrainingCosts(group_device_s=1.0),
    engine=EngineCosts(prefill_tokens_per_s=10.0, kv_move_tokens_per_s=100.0),
    tools=ToolCosts(share=0.0, start_tokens=100, tokens_per_s=0.0),
)


class Desk:
    """Two engines of 8 slots and one device; executions 0.. of group 0 on the first."""

    def __init__(self, *, num: int = 1, costs: Costs = COSTS) -> None:
        self.kernel = Kernel()
        self.told: list[Fact] = []
        accounts = [
            Account(engine=name, is_cell=True, devices=1, slots=8) for name in (SOURCE, TARGET)
        ]
        books = Books(accounts, leaving_slots=8)
        for account in accounts:
            books.change_mode(account, Mode.ROLLOUT, 0.0)
        parts = FleetParts(
            kernel=self.kernel,
            costs=costs,
            workload=LognormalWorkload(mean_s=1000.0),
            seed=1,
            books=books,
            tell=self.told.append,
        )
        engines = [
            RolloutEngine(engine=name, devices=1, slots=8, costs=costs.engine, tools=costs.tools)
            for name in (SOURCE, TARGET)
        ]
        self.fleet = Fleet(parts, engines)
        self.executions = tuple(execution_id(number) for number in range(num))
        self.fleet.dispatch(((group_id(0), self.executions),))
        for execution in self.executions:
            self.fleet.launch(execution, SOURCE)

    def move_all(self) -> None:
        self.fleet.move(tuple((execution, TARGET) for execution in self.executions))

    def run_to(self, time_s: float) -> None:
        while self.kernel.next_s is not None and self.kernel.next_s <= time_s:
            self.kernel.run_next()
        self.kernel.pass_to(time_s)

    def ends(self) -> list[float]:
        """When each execution closes from here on, in order."""
        times = []
        while self.kernel.next_s is not None:
            num = len(self.told)
            self.kernel.run_next()
            closed = [one for one in self.told[num:] if isinstance(one, ExecutionClosed)]
            times.extend(self.kernel.now_s for _ in closed)
        assert self.fleet.aborted_s == pytest.approx(0.0, abs=1e-6)
        return times


def with_engine(**numbers: object) -> Costs:
    return replace(COSTS, engine=replace(COSTS.engine, **numbers))


def with_tools(**numbers: object) -> Costs:
    return replace(COSTS, tools=replace(COSTS.tools, **numbers))


def test_undisturbed_executions_end_after_their_duration() -> None:
    assert Desk(num=3).ends() == [1000.0, 1000.0, 1000.0]


def test_a_move_reads_the_blocks_of_one_request_after_another() -> None:
    desk = Desk(num=3)
    desk.run_to(400.0)
    desk.move_all()
    assert desk.ends() == pytest.approx([1001.0, 1002.0, 1003.0])
    assert desk.fleet.tally.kv_moved_tokens == 300.0
    assert desk.fleet.tally.num_moves == 3


def test_without_handoff_a_move_recomputes() -> None:
    desk = Desk(num=2, costs=with_engine(has_kv_handoff=False))
    desk.run_to(400.0)
    desk.move_all()
    assert desk.ends() == pytest.approx([1010.0, 1020.0])


def test_a_freeze_holds_what_moves() -> None:
    desk = Desk(costs=with_engine(freeze_s=7.0))
    desk.run_to(400.0)
    desk.move_all()
    assert desk.ends() == pytest.approx([1008.0])


def test_a_move_to_an_engine_that_loads_waits_for_its_door_and_recomputes_there() -> None:
    desk = Desk()
    desk.run_to(400.0)
    desk.fleet.publish(TARGET, 50.0)
    desk.run_to(420.0)
    desk.move_all()
    assert desk.ends() == pytest.approx([1000.0 + 30.0 + 10.0])
    assert desk.fleet.tally.kv_moved_tokens == 0.0


def test_a_publication_holds_and_recomputes_every_running_request() -> None:
    desk = Desk(num=2)
    desk.run_to(400.0)
    desk.fleet.publish(SOURCE, 50.0)
    assert desk.ends() == pytest.approx([1060.0, 1070.0])
    assert desk.fleet.tally.stalled_s == pytest.approx(130.0)


def test_a_tool_call_goes_on_through_a_publication_and_its_next_turn_recomputes() -> None:
    desk = Desk(num=2, costs=with_tools(share=1.0, call_s=1e9))
    desk.run_to(400.0)
    desk.fleet.publish(SOURCE, 50.0)
    assert desk.ends() == pytest.approx([1010.0, 1010.0])


def test_an_execution_in_a_tool_call_has_nothing_more_to_move() -> None:
    desk = Desk(costs=with_tools(share=1.0, call_s=1e9))
    desk.run_to(400.0)
    desk.move_all()
    assert desk.fleet.tally.kv_moved_tokens == 0.0
    assert desk.ends() == pytest.approx([1010.0])


def test_a_displaced_request_stands_still_until_it_has_a_slot() -> None:
    desk = Desk()
    desk.run_to(400.0)
    desk.fleet.displace(SOURCE)
    desk.run_to(700.0)
    desk.move_all()
    assert desk.ends() == pytest.approx([1000.0 + 300.0 + 10.0])
    assert (desk.fleet.tally.num_replaced, desk.fleet.tally.num_moves) == (1, 0)


def test_a_displaced_execution_in_a_tool_call_loses_only_the_recompute() -> None:
    desk = Desk(costs=with_tools(share=1.0, call_s=1e9))
    desk.run_to(400.0)
    desk.fleet.displace(SOURCE)
    desk.run_to(700.0)
    desk.move_all()
    assert desk.ends() == pytest.approx([1010.0])


def test_a_displaced_tool_call_cannot_work_past_the_end() -> None:
    desk = Desk(costs=with_tools(share=1.0, call_s=1e9, start_tokens=0))
    desk.run_to(400.0)
    desk.fleet.displace(SOURCE)
    desk.run_to(3000.0)
    desk.move_all()
    assert desk.ends() == pytest.approx([3000.0])


def test_a_cancelled_execution_closes_at_once_without_a_verdict() -> None:
    desk = Desk()
    desk.run_to(400.0)
    desk.fleet.cancel(desk.executions[0], was_queued=False)
    desk.fleet.cancel(desk.executions[0], was_queued=False)
    assert desk.told[0] == ExecutionClosed(execution=desk.executions[0], outcome=Outcome.CANCELLED)
    verdict = desk.told[1]
    assert isinstance(verdict, VerdictGiven)
    assert verdict.reward is None
    assert desk.fleet.tally.cancelled_s == pytest.approx(400.0)
    assert desk.ends() == []
    assert len(desk.told) == 2


def test_a_verdict_comes_after_its_grading_and_no_slot_is_held_for_it() -> None:
    graders = GraderCosts(grade_s=100.0, num_graders=2)
    desk = Desk(num=3, costs=replace(COSTS, grader=graders))
    times = []
    while desk.kernel.next_s is not None:
        num = len(desk.told)
        desk.kernel.run_next()
        verdicts = [one for one in desk.told[num:] if isinstance(one, VerdictGiven)]
        times.extend(desk.kernel.now_s for _ in verdicts)
        if desk.kernel.now_s == 1000.0:
            continue
        assert desk.fleet.waterlevel == 0
    assert times == [1100.0, 1100.0, 1200.0]


def test_a_group_weighs_what_its_executions_lasted() -> None:
    desk = Desk(num=2)
    assert desk.fleet.weigh(group_id(0)) == 1.0
    desk.ends()
    assert desk.fleet.weigh(group_id(0)) == pytest.approx(1.0)
    assert desk.fleet.weigh(group_id(5)) == 1.0
