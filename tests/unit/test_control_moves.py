"""Rules 6-8, 10 and 2.2, 2.5: who leaves, how, and what deaths and late versions change."""

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.bursts import Phase
from opengyre.control.cells import EngineState
from opengyre.control.ids import GroupId
from tests.unit.control_desk import Desk, make_config, names


def roles(desk: Desk) -> list[str]:
    return [role.value for role in desk.view.role_by_cell]


def state_of(desk: Desk, engine: str) -> EngineState:
    return next(one.state for one in desk.view.engines if one.engine == engine)


def test_a_cell_leaves_door_then_routes_then_freeze_then_training() -> None:
    desk = Desk(make_config(num_cells=1)).start()
    order = [
        name for name in names(desk.finish("g00000")) if name not in ("Offer", "Launch", "Admit")
    ]
    assert order[:5] == ["CloseDoor", "Reroute", "Freeze", "EnterTraining", "OpenStep"]


def test_the_reason_of_a_transition_carries_the_numbers_of_the_test() -> None:
    desk = Desk(make_config()).start()
    desk.finish("g00000")
    door = next(one for one in desk.given if isinstance(one, c.CloseDoor))
    assert door.reason == "core leaves: w = 2 <= 16 slots left; 1 of 2 groups ready for 0.0 s"


def test_no_cell_leaves_while_the_rest_could_not_hold_the_waterlevel() -> None:
    desk = Desk(make_config(num_cells=1, slots=4, groups_per_step=4, supply_fraction=0.25)).start()
    new = desk.finish("g00000")
    assert "CloseDoor" not in names(new)
    assert "core stays: w = 6 needs 6 slots, 4 would remain" in desk.waiting_for
    new = desk.finish("g00001")
    assert "CloseDoor" in names(new)


def test_no_cell_leaves_before_supply_was_held() -> None:
    desk = Desk(make_config(supply_hold_s=2.0)).start()
    assert "CloseDoor" not in names(desk.finish("g00000"))
    assert desk.scheduler.next_wakeup_s() == 2.0
    assert "CloseDoor" in names(desk.settle(after_s=2.0))


def test_the_core_leaves_for_less_when_nothing_more_can_come() -> None:
    config = make_config(groups_per_step=4, supply_fraction=0.5)
    desk = Desk(config).start()
    desk.finish("g00000", "g00001", "g00002", reward=None)
    assert "CloseDoor" in names(desk.finish("g00003"))


def test_satellites_follow_one_at_a_time_in_order_and_join_the_open_step() -> None:
    desk = Desk(make_config(num_cells=3, groups_per_step=4, supply_fraction=0.25)).start()
    desk.finish("g00000", "g00001")
    doors = [one.engine for one in desk.given if isinstance(one, c.CloseDoor)]
    assert doors == ["c0", "c1", "c2"]
    admits = [one.cell for one in desk.given if isinstance(one, c.Admit)]
    assert admits == [1, 2]
    assert roles(desk) == ["training"] * 3


def test_a_failed_door_abandons_the_transition_and_opens_again() -> None:
    desk = Desk(make_config(), c.CloseDoor).start()
    desk.finish("g00000")
    desk.fail(desk.last(c.CloseDoor))
    assert names(desk.settle()) == ["OpenDoor"]
    assert roles(desk) == ["rollout", "rollout"]
    assert names(desk.settle(after_s=1.0)) == ["CloseDoor"]


def test_a_failed_reroute_puts_the_executions_back_at_their_source() -> None:
    desk = Desk(make_config(num_cells=1), c.Reroute).start()
    desk.finish("g00000")
    before = {one.engine: one.num_used for one in desk.view.engines}
    assert before["c0"] == 0
    reroute = desk.last(c.Reroute)
    assert isinstance(reroute, c.Reroute)
    desk.fail(reroute)
    assert "OpenDoor" in names(desk.settle())
    after = {one.engine: one.num_used for one in desk.view.engines}
    assert after["c0"] == len(reroute.moves)


def test_an_unknown_freeze_makes_the_cell_suspect_and_fences_it() -> None:
    desk = Desk(make_config(), c.Freeze).start()
    desk.finish("g00000")
    desk.fail(desk.last(c.Freeze), is_unknown=True)
    assert "Fence" in names(desk.settle())
    assert roles(desk) == ["absent", "rollout"]


def test_a_burst_that_ends_before_the_freeze_abandons_the_leaving_cell() -> None:
    desk = Desk(make_config(groups_per_step=4, supply_fraction=0.25)).start()
    desk.held.add(c.CloseDoor)
    desk.finish("g00000")
    assert roles(desk) == ["leaving", "rollout"]
    desk.apply(desk.last(c.CloseDoor))
    desk.settle()
    desk.finish("g00001", "g00002")
    assert roles(desk) == ["training", "leaving"]
    desk.finish("g00003")
    desk.assign("g00000", "g00001", "g00002", "g00003")
    new = desk.commit()
    assert roles(desk)[1] == "leaving"
    desk.apply(desk.last(c.CloseDoor))
    new = desk.settle()
    assert "Freeze" not in names(new)
    assert roles(desk) == ["rollout", "rollout"]


def test_a_burst_that_ends_after_the_freeze_lets_the_cell_arrive_and_turn_back() -> None:
    desk = Desk(make_config(groups_per_step=4, supply_fraction=0.25)).start()
    desk.held.add(c.EnterTraining)
    desk.finish("g00000")
    desk.apply(desk.last(c.EnterTraining))
    desk.finish("g00001", "g00002", "g00003")
    assert roles(desk) == ["training", "leaving"]
    desk.assign("g00000", "g00001", "g00002", "g00003")
    desk.commit()
    assert desk.view.is_returning_by_cell == (False, True)
    desk.apply(desk.last(c.EnterTraining))
    new = desk.settle()
    assert names(new)[:2] == ["LeaveTraining", "OpenDoor"]
    assert roles(desk) == ["rollout", "rollout"]


def test_a_lost_standalone_engine_displaces_its_executions_and_changes_no_count() -> None:
    desk = Desk(make_config(slots=4, num_cells=1, num_standalone=1)).start()
    before = desk.view
    used = next(one.num_used for one in before.engines if one.engine == "s0")
    assert used > 0
    new = desk.lose("s0")
    assert names(new) == ["Reroute"]
    after = desk.view
    assert (after.launched, after.waterlevel) == (before.launched, before.waterlevel)
    assert after.num_displaced == 0


def test_displaced_executions_without_a_slot_wait_before_the_queue() -> None:
    desk = Desk(make_config(slots=2, num_cells=1, num_standalone=1, groups_per_step=3)).start()
    assert desk.view.num_queued == 2
    desk.lose("s0")
    assert desk.view.num_displaced == 2
    home = next(
        one.execution for one in desk.given if isinstance(one, c.Launch) and one.engine == "c0"
    )
    desk.close(home)
    assert names(desk.settle()) == ["Reroute"]
    assert (desk.view.num_displaced, desk.view.num_queued) == (1, 2)


def test_nothing_leaves_while_lost_capacity_is_below_the_waterlevel() -> None:
    desk = Desk(make_config(slots=4, num_cells=2, groups_per_step=4, supply_fraction=0.25)).start()
    desk.lose("s0")
    new = desk.finish("g00000")
    assert "CloseDoor" not in names(new)
    assert "core stays: w = 6 needs 6 slots, 4 would remain" in desk.waiting_for


def test_a_recall_takes_the_last_satellite_and_its_work_goes_back_to_the_stream() -> None:
    config = make_config(num_cells=2, slots=4, groups_per_step=4, supply_fraction=0.25)
    desk = Desk(config).start()
    desk.finish("g00000", "g00001")
    assert roles(desk) == ["training", "training"]
    desk.lose("s0")
    assert desk.view.capacity < desk.view.waterlevel
    new = desk.settle(after_s=60.0)
    assert names(new)[:2] == ["DropMember", "LeaveTraining"]
    assert roles(desk) == ["training", "rollout"]
    assert desk.view.num_displaced == 0


def test_a_recall_of_the_core_abandons_its_step_and_the_groups_are_ready_again() -> None:
    config = make_config(num_cells=1, slots=6, groups_per_step=4, supply_fraction=0.25)
    desk = Desk(config).start()
    desk.finish("g00000")
    desk.assign("g00000")
    assert roles(desk) == ["training"]
    desk.lose("s0")
    new = desk.settle(after_s=60.0)
    assert names(new)[:2] == ["AbandonStep", "LeaveTraining"]
    assert (desk.view.num_ready, desk.view.num_assigned) == (1, 0)
    assert (desk.view.version, desk.view.num_displaced) == (0, 0)


def test_a_core_recalled_after_a_commit_makes_that_step_durable_first() -> None:
    config = make_config(
        num_cells=1, slots=12, groups_per_step=2, steps_per_burst=2, supply_fraction=0.5
    )
    desk = Desk(config).start()
    desk.train("g00000", "g00001")
    assert (desk.view.burst, desk.view.steps_done) == (1, 1)
    desk.lose("s0")
    new = desk.settle(after_s=60.0)
    assert [one for one in names(new) if one != "Reroute"][:4] == [
        "AbandonStep",
        "Checkpoint",
        "LeaveTraining",
        "OpenDoor",
    ]
    assert desk.view.published_version == 0
    assert desk.last(c.LeaveTraining).version == 1  # type: ignore[union-attr]


def test_the_cores_death_redoes_the_steps_of_the_burst_with_the_same_groups() -> None:
    desk = Desk(make_config(steps_per_burst=2, num_steps=4)).start()
    desk.train("g00002", "g00000")
    desk.finish("g00001", "g00003")
    desk.assign("g00003")
    assert (desk.view.version, desk.view.steps_done) == (1, 1)
    desk.lose("c0")
    assert (desk.view.version, desk.view.steps_done, desk.view.num_consumed) == (0, 0, 0)
    desk.bring_back("c0", version=0)
    new = desk.settle()
    assert names(new)[0] == "EnterTraining"
    assert desk.last(c.Offer).groups == ("g00000", "g00002")  # type: ignore[union-attr]
    desk.version = 0
    desk.assign("g00000", "g00002")
    desk.commit()
    assert desk.last(c.OpenStep).reason == "step 2 of 2 in burst 1, again with 1 groups"
    assert set(desk.last(c.Offer).groups) == {"g00001", "g00003"}  # type: ignore[union-attr]


def test_a_dead_satellite_leaves_the_order_until_the_next_boundary() -> None:
    desk = Desk(make_config(num_cells=3, groups_per_step=4, supply_fraction=0.25)).start()
    desk.finish("g00000", "g00001")
    assert roles(desk) == ["training"] * 3
    desk.lose("c1")
    desk.bring_back("c1", version=0)
    new = desk.finish("g00002")
    assert "CloseDoor" not in names(new)
    desk.finish("g00003")
    desk.assign("g00000", "g00001", "g00002", "g00003")
    desk.commit()
    new = desk.finish("g00004", "g00005")
    assert [one.engine for one in new if isinstance(one, c.CloseDoor)] == ["c0", "c1", "c2"]


def test_groups_that_came_back_are_offered_again() -> None:
    desk = Desk(make_config(groups_per_step=3, supply_fraction=0.3)).start()
    desk.finish("g00000")
    desk.assign("g00000")
    desk.tell(f.GroupReturned(group=GroupId("g00000"), step=1))
    assert desk.view.num_ready == 1
    assert names(desk.settle()) == ["Offer"]


def test_a_closed_step_keeps_the_groups_it_closed_with() -> None:
    desk = Desk(make_config()).start()
    desk.finish("g00000", "g00001")
    desk.assign("g00000", "g00001")
    desk.tell(f.GroupReturned(group=GroupId("g00000"), step=1))
    assert (desk.view.num_assigned, desk.view.num_ready) == (2, 0)


def test_a_satellite_that_does_not_join_in_time_is_dropped_from_the_step() -> None:
    config = make_config(groups_per_step=4, supply_fraction=0.25, join_deadline_s=7.0)
    desk = Desk(config, c.Admit).start()
    desk.finish("g00000", "g00001")
    assert desk.scheduler.next_wakeup_s() == 7.0
    new = desk.settle(after_s=7.0)
    assert names(new) == ["DropMember"]
    late = desk.last(c.Admit)
    assert isinstance(late, c.Admit)
    desk.tell(f.MemberAdmitted(step=late.step, cell=late.cell))
    assert desk.view.refused == (("a member that was dropped or has joined", 1),)


def test_a_late_publication_is_quarantined_and_a_later_answer_ends_that() -> None:
    desk = Desk(make_config(publish_timeout_s=10.0)).start()
    desk.held.add(c.Publish)
    desk.train("g00000", "g00001")
    capacity = desk.view.capacity
    desk.settle(after_s=10.0)
    assert state_of(desk, "s0") is EngineState.QUARANTINED
    assert desk.view.capacity == capacity - 8
    for command in [one for one in desk.given if isinstance(one, c.Publish)]:
        desk.apply(command)
    desk.settle()
    assert state_of(desk, "s0") is EngineState.OPEN
    assert desk.view.capacity == capacity


def test_a_publication_twice_as_late_is_fenced() -> None:
    desk = Desk(make_config(publish_timeout_s=10.0)).start()
    desk.held.add(c.Publish)
    desk.train("g00000", "g00001")
    desk.settle(after_s=10.0)
    assert "Fence" in names(desk.settle(after_s=10.0))


def test_an_engine_that_comes_back_with_an_old_version_gets_the_due_one_before_it_opens() -> None:
    desk = Desk(make_config()).start()
    desk.train("g00000", "g00001")
    desk.lose("s0")
    desk.bring_back("s0", version=0)
    new = desk.settle()
    assert [one for one in names(new) if one in ("Publish", "OpenDoor")] == ["Publish"]


def test_an_older_incarnation_is_refused() -> None:
    desk = Desk(make_config()).start()
    desk.lose("s0")
    desk.bring_back("s0", version=0)
    desk.settle()
    desk.lose("s0")
    assert state_of(desk, "s0") is EngineState.OPEN
    assert desk.view.refused == (("an older incarnation", 1),)


def test_a_core_that_stays_away_ends_the_run_as_failed() -> None:
    desk = Desk(make_config(lost_deadline_s=100.0)).start()
    desk.lose("c0")
    desk.settle(after_s=100.0)
    assert desk.view.phase is Phase.ENDING
    assert desk.waiting_for == (
        "end waits for 4 executions to close",
        "core is dead and not started again yet",
    )


def test_a_core_that_dies_in_rollout_has_lost_nothing() -> None:
    desk = Desk(make_config()).start()
    desk.train("g00000", "g00001")
    assert roles(desk)[0] == "rollout"
    desk.lose("c0")
    desk.bring_back("c0", version=1)
    desk.settle()
    assert (desk.view.steps_done, desk.view.version) == (1, 1)
    assert state_of(desk, "c0") is EngineState.OPEN


def test_a_drop_that_failed_is_told_again_and_the_cell_is_fenced() -> None:
    config = make_config(groups_per_step=4, supply_fraction=0.25, join_deadline_s=7.0)
    desk = Desk(config, c.Admit, c.DropMember).start()
    desk.finish("g00000", "g00001")
    desk.settle(after_s=7.0)
    desk.fail(desk.last(c.DropMember))
    assert sorted(names(desk.settle())) == ["DropMember", "Fence"]


def test_no_cell_leaves_before_displaced_executions_have_found_slots() -> None:
    desk = Desk(make_config(num_cells=2, slots=8)).start()
    desk.held.add(c.Publish)
    desk.train("g00000", "g00001")
    desk.lose("c0")
    desk.lose("c1")
    assert desk.view.num_displaced == 4
    desk.close(*desk.members_by_group[GroupId("g00002")])
    desk.bring_back("c0", version=1)
    new = desk.settle()
    assert names(new)[:2] == ["OpenDoor", "Reroute"]
    assert names(new).index("Reroute") < names(new).index("CloseDoor")
