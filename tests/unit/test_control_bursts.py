"""Rules 2-4, 9, 11 and 12: dispatch, steps, boundaries, evaluation, the end."""

import pytest

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole
from opengyre.control.errors import InvariantError
from opengyre.control.ids import ExecutionId
from tests.unit.control_desk import Desk, make_config, names


def test_the_first_boundary_waits_for_every_engine() -> None:
    desk = Desk(make_config())
    desk.tell(f.EngineReady(engine=desk.config.engines[0].engine, incarnation=1, version=0))
    desk.settle()
    assert desk.view.phase is Phase.STARTING
    assert desk.waiting_for[0] == "start waits for c1, s0"


def test_the_first_boundary_goes_on_without_an_engine_that_was_lost() -> None:
    desk = Desk(make_config())
    desk.lose("s0")
    desk.start()
    assert desk.view.phase is Phase.RUNNING


def test_the_first_dispatch_is_phi_plus_mu_steps_of_groups() -> None:
    desk = Desk(make_config(run_ahead=1, steps_per_burst=2, num_steps=9)).start()
    assert desk.view.num_live == 3 * 2
    assert desk.view.dispatched == desk.view.launched == 12


def test_dispatch_never_exceeds_what_the_remaining_steps_can_consume() -> None:
    desk = Desk(make_config(run_ahead=3, steps_per_burst=1, num_steps=2)).start()
    assert desk.view.num_live == 2 * 2
    desk.train("g00000", "g00001")
    assert desk.view.dispatched == 8


def test_a_void_group_at_phi_zero_makes_the_step_short_and_is_replaced_at_the_boundary() -> None:
    desk = Desk(make_config()).start()
    desk.finish("g00000", reward=None)
    desk.finish("g00001")
    new = desk.assign("g00001")
    close = new[0]
    assert isinstance(close, c.CloseStep)
    assert (close.num_groups, close.reason) == (1, "short: 1 of 2 groups, no more can come")
    assert desk.view.dispatched == 4
    desk.commit()
    assert (desk.view.num_void, desk.view.num_short_steps) == (1, 1)
    assert desk.view.dispatched == 8


def test_the_last_step_may_be_short_and_the_run_ends_well() -> None:
    desk = Desk(make_config(num_steps=1)).start()
    desk.finish("g00000", reward=None)
    desk.train("g00001")
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert not end.failed


def test_a_burst_without_any_group_left_ends_at_once_and_counts_its_steps_as_empty() -> None:
    desk = Desk(make_config(steps_per_burst=2, num_steps=4)).start()
    desk.finish("g00000", "g00001", "g00002", "g00003", reward=None)
    assert (desk.view.num_empty_steps, desk.view.steps_done, desk.view.burst) == (2, 2, 2)
    assert desk.view.num_live == 4


def test_a_step_without_trainable_tokens_consumes_its_groups_and_keeps_the_version() -> None:
    desk = Desk(make_config()).start()
    desk.finish("g00000", "g00001")
    desk.assign("g00000", "g00001")
    desk.tell(f.StepCommitted(step=1, version=0))
    desk.settle()
    assert (desk.view.version, desk.view.num_consumed, desk.view.steps_done) == (0, 2, 1)


def test_void_groups_in_a_row_stop_the_run_with_a_reason() -> None:
    desk = Desk(make_config(max_void_in_a_row=2)).start()
    desk.finish("g00000", "g00001", reward=None)
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert end.failed
    assert "2 groups in a row ended with too few valid members" in end.reason


def test_executions_carried_over_three_boundaries_stay_in_the_waterlevel() -> None:
    desk = Desk(make_config(run_ahead=1, num_steps=9, max_staleness=4, slots=12)).start()
    straggler = desk.members_by_group["g00003"]
    for groups in (("g00000", "g00001"), ("g00002", "g00004"), ("g00005", "g00006")):
        desk.train(*groups)
        assert desk.view.waterlevel == desk.view.dispatched - desk.view.finished
    assert desk.view.published_version == 3
    before = desk.view.waterlevel
    desk.close(*straggler)
    desk.settle()
    assert desk.view.waterlevel == before - 2
    assert "g00003" in desk.last(c.Offer).groups  # type: ignore[union-attr]


def test_a_burst_ends_durable_then_exposed_then_returning_then_published_then_dispatched() -> None:
    desk = Desk(make_config()).start()
    desk.finish("g00000", "g00001")
    desk.assign("g00000", "g00001")
    order = names(desk.commit())
    wanted = ["Checkpoint", "Expose", "LeaveTraining", "Publish", "DispatchGroups", "OpenDoor"]
    places = [order.index(name) for name in wanted]
    assert places == sorted(places)


def test_nothing_is_dispatched_while_the_checkpoint_is_not_durable() -> None:
    desk = Desk(make_config(), c.Checkpoint).start()
    order = names(desk.train("g00000", "g00001"))
    assert order[-1] == "Checkpoint"
    assert desk.view.dispatched == 4
    assert desk.waiting_for[0] == "boundary waits for checkpointing version 1"


def test_a_checkpoint_with_an_unknown_answer_fences_the_core_and_its_step_is_redone() -> None:
    desk = Desk(make_config(), c.Checkpoint).start()
    desk.train("g00000", "g00001")
    desk.fail(desk.last(c.Checkpoint), is_unknown=True)
    given = desk.settle()
    assert [one.engine for one in given if isinstance(one, c.Fence)] == ["c0"]
    assert desk.view.phase is Phase.RUNNING
    desk.bring_back("c0", version=0)
    desk.settle()
    assert (desk.view.step, desk.view.steps_done) == (1, 0)


def test_a_failed_checkpoint_ends_the_run_as_failed() -> None:
    desk = Desk(make_config(), c.Checkpoint).start()
    desk.train("g00000", "g00001")
    desk.fail(desk.last(c.Checkpoint))
    desk.settle()
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert (end.failed, "Checkpoint failed" in end.reason) == (True, True)


def test_the_core_is_retained_when_enough_is_ready_and_the_others_have_the_slots() -> None:
    desk = Desk(make_config(run_ahead=1, num_cells=1, slots=8)).start()
    desk.finish("g00000", "g00001", "g00002")
    desk.assign("g00000", "g00001")
    new = desk.commit()
    assert "LeaveTraining" not in names(new)
    assert desk.view.role_by_cell == (CellRole.TRAINING,)
    assert desk.view.step == 2


def test_the_core_returns_when_the_others_lack_slots_for_what_is_dispatched() -> None:
    desk = Desk(make_config(run_ahead=1, num_cells=1, slots=4)).start()
    desk.finish("g00000", "g00001", "g00002")
    desk.assign("g00000", "g00001")
    assert "LeaveTraining" in names(desk.commit())


def test_an_execution_cancelled_in_the_queue_is_launched_and_finished_at_once() -> None:
    desk = Desk(make_config(num_cells=1, num_standalone=0, slots=1), c.Cancel).start()
    assert (desk.view.launched, desk.view.num_queued) == (1, 3)
    desk.tell(f.StopRequested(reason="a person asked"))
    new = desk.settle()
    queued = [one for one in new if isinstance(one, c.Cancel) and one.was_queued]
    assert len(queued) == 3
    assert (desk.view.launched, desk.view.finished) == (4, 3)
    desk.tell(f.ExecutionClosed(execution=ExecutionId("e000000"), outcome=f.Outcome.CANCELLED))
    assert names(desk.settle()) == ["EndRun"]
    assert dict(desk.view.num_by_outcome)[f.Outcome.CANCELLED] == 4


def test_a_stop_abandons_the_open_step_and_is_not_a_failure() -> None:
    desk = Desk(make_config()).start()
    desk.finish("g00000")
    desk.tell(f.StopRequested(reason="a person asked"))
    new = desk.settle()
    assert "AbandonStep" in names(new)
    desk.tell(
        *(
            f.ExecutionClosed(execution=one, outcome=f.Outcome.CANCELLED)
            for one in desk.members_by_group["g00001"]
        )
    )
    desk.settle()
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert (end.failed, end.reason) == (False, "a person asked")


def test_executions_that_never_close_after_their_cancel_fail_the_end_in_bounded_time() -> None:
    desk = Desk(make_config(cancel_deadline_s=5.0)).start()
    desk.tell(f.StopRequested(reason="stop"))
    desk.settle()
    assert desk.scheduler.next_wakeup_s() == 5.0
    desk.settle(after_s=5.0)
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert end.failed
    assert "4 executions did not close" in end.reason


def test_evaluation_is_dispatched_first_and_forms_no_group() -> None:
    desk = Desk(make_config(num_eval_executions=3, eval_at_start=True)).start()
    order = names(desk.given)
    assert order.index("DispatchEval") < order.index("DispatchGroups")
    assert (desk.view.dispatched, desk.view.num_live) == (7, 2)


def test_evaluation_past_its_deadline_is_cancelled_and_holds_up_nothing() -> None:
    desk = Desk(make_config(num_eval_executions=2, eval_at_start=True, eval_deadline_s=9.0)).start()
    new = desk.settle(after_s=9.0)
    assert names(new) == ["Cancel", "Cancel"]
    assert {one.execution for one in new if isinstance(one, c.Cancel)} == set(desk.evals)


def test_the_final_evaluation_runs_under_the_last_version_before_the_end() -> None:
    desk = Desk(make_config(num_steps=1, num_eval_executions=2, eval_at_end=True)).start()
    desk.train("g00000", "g00001")
    assert desk.view.phase is Phase.FINAL_EVAL
    evaluation = desk.last(c.DispatchEval)
    assert isinstance(evaluation, c.DispatchEval)
    assert evaluation.version == 1
    desk.close(*desk.evals)
    assert names(desk.settle()) == ["EndRun"]


def test_a_second_outcome_is_refused_and_counted() -> None:
    desk = Desk(make_config()).start()
    one = desk.members_by_group["g00000"][0]
    closed = f.ExecutionClosed(execution=one, outcome=f.Outcome.COMPLETED)
    desk.tell(closed, closed)
    assert (desk.view.finished, desk.view.refused) == (1, (("a second outcome", 1),))


def test_an_outcome_of_an_execution_nobody_dispatched_is_our_own_fault() -> None:
    desk = Desk(make_config()).start()
    with pytest.raises(InvariantError, match="e000999"):
        desk.tell(f.ExecutionClosed(execution=ExecutionId("e000999"), outcome=f.Outcome.COMPLETED))


def test_a_launch_that_fails_is_a_finish_without_a_verdict() -> None:
    desk = Desk(make_config(), c.Launch).start()
    launch = desk.last(c.Launch)
    desk.fail(launch)
    assert (desk.view.launched, desk.view.finished) == (4, 1)


def test_a_step_waits_for_an_older_group_and_says_for_which() -> None:
    desk = Desk(make_config(run_ahead=1, num_steps=9, max_staleness=1, slots=12)).start()
    desk.train("g00000", "g00001")
    desk.finish("g00004", "g00005")
    desk.finish("g00002")
    assert desk.last(c.Offer).groups == ("g00002",)  # type: ignore[union-attr]
    assert (
        "step 2 waits for g00003 of version 0: newer groups would push it past staleness 1"
        in desk.waiting_for
    )


def test_a_late_look_quarantines_and_fences_in_one_plan() -> None:
    desk = Desk(make_config(publish_timeout_s=10.0)).start()
    desk.held.add(c.Publish)
    desk.train("g00000", "g00001")
    desk.now_s += 25.0
    plan = desk.scheduler.decide(desk.now_s)
    assert "s0" in {one.engine for one in plan.commands if isinstance(one, c.Fence)}
    assert desk.scheduler.decide(desk.now_s).commands == ()
