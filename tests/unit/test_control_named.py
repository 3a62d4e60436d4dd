"""The named cases of the scheduling rules, played by hand with the right value asserted."""

import pytest

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.config import PolicyName
from opengyre.control.ids import GroupId
from tests.unit.control_desk import Desk, make_config, names

# (LOSSY_S + 300.0) - LOSSY_S is a little less than 300.0
LOSSY_S = 383.3239885465221


def numbers_of(command: c.AnyCommand) -> tuple[int, int]:
    assert isinstance(command, c.DispatchGroups)
    return len(command.groups), command.version


def test_a_void_group_at_phi_zero_is_missed_by_the_last_step_of_its_burst_only() -> None:
    desk = Desk(make_config(steps_per_burst=2, num_steps=4)).start()
    desk.finish("g00000", reward=None)
    desk.train("g00001", "g00002")
    assert (desk.view.num_short_steps, desk.view.need) == (0, 1)
    desk.train("g00003")
    close = desk.last(c.CloseStep)
    assert isinstance(close, c.CloseStep)
    assert (close.step, close.num_groups) == (2, 1)
    assert (desk.view.num_short_steps, desk.view.num_void, desk.view.steps_done) == (1, 1, 2)
    assert numbers_of(desk.last(c.DispatchGroups)) == (4, 2)


def test_the_last_step_of_the_run_closes_short_and_nothing_is_dispatched_for_it() -> None:
    desk = Desk(make_config(num_steps=2, run_ahead=1)).start()
    assert numbers_of(desk.last(c.DispatchGroups)) == (4, 0)
    desk.train("g00000", "g00001")
    desk.finish("g00002", reward=None)
    desk.train("g00003")
    assert (desk.view.steps_done, desk.view.num_short_steps, desk.view.dispatched) == (2, 1, 8)
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert not end.failed


def test_carried_over_groups_reduce_the_dispatch_of_each_of_three_boundaries() -> None:
    """B 2, mu 1, phi 1: four outstanding at most; g00003 is not over for three bursts."""
    desk = Desk(make_config(run_ahead=1, num_steps=9, max_staleness=4, slots=12)).start()
    waterlevels, dispatched = [], []
    for groups in (("g00000", "g00001"), ("g00002", "g00004"), ("g00005", "g00006")):
        desk.train(*groups)
        waterlevels.append(desk.view.waterlevel)
        dispatched.append(numbers_of(desk.last(c.DispatchGroups)))
    assert dispatched == [(2, 1), (2, 2), (2, 3)]
    assert waterlevels == [8, 8, 8]
    desk.train("g00003", "g00007")
    assert (desk.view.steps_done, desk.view.num_dropped) == (4, 0)


def test_an_overdue_evaluation_is_cancelled_in_the_queue_and_the_burst_goes_on() -> None:
    config = make_config(
        num_cells=1,
        num_standalone=0,
        slots=2,
        num_eval_executions=3,
        eval_at_start=True,
        eval_deadline_s=5.0,
    )
    desk = Desk(config, c.Cancel).start()
    assert (desk.view.launched, desk.view.num_queued) == (2, 5)
    new = desk.settle(after_s=5.0)
    cancels = [one for one in new if isinstance(one, c.Cancel)]
    assert [one.was_queued for one in cancels] == [False, False, True]
    assert (desk.view.launched, desk.view.finished, desk.view.num_queued) == (3, 1, 4)
    assert dict(desk.view.num_by_outcome)[f.Outcome.CANCELLED] == 1


def test_the_standalone_pool_lost_for_good_leaves_a_run_that_trains_with_its_cells() -> None:
    """Four executions need four of the six slots of c1 and c0 together; c0 alone may leave."""
    desk = Desk(make_config(slots=3, num_steps=2)).start()
    desk.lose("s0")
    assert {one.engine: one.state for one in desk.view.engines}["s0"] is EngineState.ABSENT
    assert desk.view.capacity == 6
    assert desk.view.num_displaced == 0
    new = desk.finish("g00000")
    assert [one.engine for one in new if isinstance(one, c.CloseDoor)] == ["c0"]
    desk.train("g00000", "g00001")
    desk.train("g00002", "g00003")
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert (end.failed, desk.view.steps_done, desk.view.waterlevel) == (False, 2, 0)


def test_a_recalled_core_trains_its_groups_later_under_the_same_version() -> None:
    config = make_config(num_cells=1, slots=6, groups_per_step=4, supply_fraction=0.25)
    desk = Desk(config).start()
    desk.finish("g00000")
    desk.assign("g00000")
    desk.lose("s0")
    desk.settle(after_s=60.0)
    assert (desk.view.role_by_cell, desk.view.version) == ((CellRole.ROLLOUT,), 0)
    assert (desk.view.num_ready, desk.view.step) == (1, None)
    desk.bring_back("s0", version=0)
    new = desk.settle()
    assert "CloseDoor" in names(new)
    again = desk.last(c.OpenStep)
    assert isinstance(again, c.OpenStep)
    assert (again.step, again.version) == (1, 0)
    desk.finish("g00001", "g00002", "g00003")
    desk.assign("g00000", "g00001", "g00002", "g00003")
    desk.commit()
    assert (desk.view.num_consumed, desk.view.steps_done, desk.view.version) == (4, 1, 1)


def test_a_burst_that_ends_while_routes_change_turns_the_cell_back_and_keeps_the_routes() -> None:
    """Before its first freeze: abandoned once the routes are answered, then published to."""
    desk = Desk(make_config(run_ahead=1, num_steps=6)).start()
    desk.held.add(c.Reroute)
    desk.finish("g00000")
    desk.apply(desk.last(c.Reroute))
    desk.settle()
    desk.finish("g00001")
    reroute = desk.last(c.Reroute)
    assert isinstance(reroute, c.Reroute)
    assert desk.view.role_by_cell == (CellRole.TRAINING, CellRole.LEAVING)
    desk.assign("g00000", "g00001")
    desk.commit()
    assert desk.view.role_by_cell[1] is CellRole.LEAVING
    freezes = [one.engine for one in desk.given if isinstance(one, c.Freeze)]
    desk.apply(reroute)
    new = desk.settle()
    assert [one.engine for one in new if isinstance(one, c.Publish)] == ["c1"]
    assert freezes == [one.engine for one in desk.given if isinstance(one, c.Freeze)] == ["c0"]
    assert desk.view.role_by_cell[1] is CellRole.ROLLOUT
    places = {engine for _, engine in reroute.moves}
    used = {one.engine: one.num_used for one in desk.view.engines}
    assert places == {"s0"}
    assert used["s0"] >= len(reroute.moves) > 0


def test_groups_of_a_dead_member_come_back_once_and_are_consumed_once() -> None:
    config = make_config(num_cells=2, groups_per_step=4, supply_fraction=0.25)
    desk = Desk(config).start()
    desk.finish("g00000", "g00001", "g00002")
    desk.assign("g00000", "g00001")
    desk.held.add(c.DropMember)
    desk.lose("c1")
    returned = f.GroupReturned(group=GroupId("g00000"), step=1)
    desk.tell(returned)
    assert (desk.view.num_assigned, desk.view.num_ready) == (1, 2)
    desk.tell(returned)
    assert desk.view.refused == (("a group that is not assigned", 1),)
    desk.apply(desk.last(c.DropMember))
    desk.finish("g00003")
    desk.assign("g00000", "g00002", "g00003")
    desk.commit()
    assert (desk.view.num_consumed, desk.view.num_short_steps) == (4, 0)


def test_a_core_that_is_recalled_in_a_redo_takes_the_same_groups_once_more() -> None:
    config = make_config(num_cells=1, groups_per_step=1, steps_per_burst=2, run_ahead=1)
    desk = Desk(config).start()
    desk.train("g00000")
    desk.finish("g00002")
    desk.assign("g00002")
    desk.lose("c0")
    desk.bring_back("c0", version=0)
    desk.settle()
    assert (desk.view.step, desk.view.version) == (1, 0)
    desk.lose("s0")
    desk.settle(after_s=60.0)
    assert (desk.view.role_by_cell, desk.view.step) == ((CellRole.ROLLOUT,), None)
    desk.bring_back("s0", version=0)
    desk.settle()
    for step, group in ((1, "g00000"), (2, "g00002")):
        offer = desk.last(c.Offer)
        assert isinstance(offer, c.Offer)
        assert (offer.step, offer.groups) == (step, (group,))
        desk.assign(group)
        desk.version = step - 1
        desk.commit()


@pytest.mark.parametrize("policy", [PolicyName.ELASTIC, PolicyName.COLOCATE])
def test_without_streaming_no_cell_stays_in_training_for_groups_that_are_just_dispatched(
    policy: PolicyName,
) -> None:
    config = make_config(policy=policy, is_streaming=False, run_ahead=1, num_steps=6)
    desk = Desk(config).start()
    desk.finish("g00000", "g00001", "g00002")
    desk.assign("g00000", "g00001")
    desk.finish("g00003", reward=None)
    desk.commit()
    assert (desk.view.num_ready, desk.view.num_live, desk.view.step) == (1, 3, None)
    assert desk.view.role_by_cell == (CellRole.ROLLOUT, CellRole.ROLLOUT)
    desk.finish("g00004")
    assert desk.view.role_by_cell[0] is CellRole.TRAINING


def test_a_recalled_core_says_that_it_waits_for_its_checkpoint() -> None:
    config = make_config(num_cells=1, groups_per_step=1, steps_per_burst=2, run_ahead=1)
    desk = Desk(config).start()
    desk.train("g00000")
    desk.held = {c.Checkpoint, c.AbandonStep}
    desk.lose("s0")
    desk.settle(after_s=60.0)
    words = [
        "core waits for the checkpoint of version 1 before it returns",
        "the stream was told to abandon its step and has not answered",
    ]
    assert [one for one in desk.waiting_for if one in words] == words
    desk.apply(desk.last(c.Checkpoint))
    desk.apply(desk.last(c.AbandonStep))
    desk.settle()
    assert not {*words} & {*desk.waiting_for}
    assert desk.view.role_by_cell == (CellRole.ROLLOUT,)


def test_a_fixed_split_without_a_rollout_engine_left_ends_by_its_deadline() -> None:
    """The cells that always train never come to roll out what is in the queue."""
    numbers = {"num_training_cells": 2, "lost_deadline_s": 300.0, "recall_after_s": 600.0}
    desk = Desk(make_config(policy=PolicyName.ASYNC, **numbers)).start()
    desk.now_s = LOSSY_S
    desk.lose("s0")
    assert desk.view.waterlevel > 0
    deadline_s = desk.scheduler.next_wakeup_s()
    assert deadline_s == LOSSY_S + 300.0
    desk.now_s = deadline_s
    cancels = [one for one in desk.settle() if isinstance(one, c.Cancel)]
    desk.close(*(one.execution for one in cancels if not one.was_queued), reward=None)
    desk.settle()
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert (end.failed, "every engine that rolls out" in end.reason) == (True, True)


def test_a_limit_that_passed_has_passed_whatever_its_sum_is_rounded_to() -> None:
    """At the time the scheduler asked to be woken the recall is due; the difference says a
    rounding error less."""
    config = make_config(slots=3, num_steps=2, recall_after_s=300.0, run_ahead=1)
    desk = Desk(config).start()
    desk.finish("g00000", "g00001")
    assert desk.view.role_by_cell[0] is CellRole.TRAINING
    desk.now_s = LOSSY_S
    desk.lose("s0")
    assert desk.view.capacity < desk.view.waterlevel
    due_s = desk.scheduler.next_wakeup_s()
    assert due_s == LOSSY_S + 300.0
    assert due_s - LOSSY_S < 300.0
    desk.now_s = due_s
    assert any("is recalled" in one.reason for one in desk.settle())
