"""The fold of a journal: levels, roles, device time, and the summary made of it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_run import C0, record

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.ids import CommandId, execution_id
from opengyre.store import observations as seen
from opengyre.store.journal import Row
from opengyre.store.observations import Activity, Role
from opengyre.views.fold import Fold, fold
from opengyre.views.lanes import Stretch, extend, overlay, totals
from opengyre.views.run_state import RunState
from opengyre.views.summary import summarise
from opengyre.views.words import final_lines


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    return record(tmp_path).rows


@pytest.fixture
def state(rows: list[Row]) -> RunState:
    return fold(rows)


def test_the_summary_has_every_promised_key_with_the_numbers_of_the_run(state: RunState) -> None:
    summary = summarise(state)
    told = {
        "eval_before": 0.25,
        "eval_after": 0.75,
        "reward_by_burst": [0.5, 0.875],
        "role_changes": 4,
        "mid_batch_joins": 1,
        "requests_continued": 2,
        "tokens_lost": 0,
        "harness_errors_from_moves": 0,
        "gateway_deaths": 0,
        "engine_deaths": {},
        "executions_by_outcome": {"completed": 10},
        "wall_s": 12.5,
        "seed": 7,
        "version": "0.1.0",
        "retention_decisions": {"retained": 1, "returned": 1},
        "publications_across_live_requests": 1,
        "short_steps": 0,
    }
    assert {name: summary[name] for name in told} == told
    assert set(summary["device_seconds"]) == {one.value for one in Activity}


def test_device_seconds_add_up_to_the_time_of_all_ready_devices(
    rows: list[Row], state: RunState
) -> None:
    ready = [row.now_s for row in rows if isinstance(row.value, f.EngineReady)]
    alive_s = sum(rows[-1].now_s - at_s for at_s in ready)
    seconds = state.device_seconds()
    assert sum(seconds.values()) == pytest.approx(alive_s)
    assert 5 * 0.05 <= seconds["training"] < 1.5


def test_a_measured_activity_replaces_what_the_role_suggests(rows: list[Row]) -> None:
    span = seen.ActivitySpan(engine="s0", activity=Activity.PUBLISHING, start_s=2.0, end_s=4.0)
    before = fold(rows).device_seconds()
    after = fold([*rows, replace(rows[-1], value=span)]).device_seconds()
    assert after["publishing"] == pytest.approx(before["publishing"] + 2.0)
    assert sum(after.values()) == pytest.approx(sum(before.values()))


def test_levels_follow_dispatch_moves_and_returns(rows: list[Row]) -> None:
    one = Fold()
    levels = set()
    for row in rows:
        one.apply(row)
        levels.add((one.state.counts.waterlevel, one.state.capacity))
    assert {(0, 8), (5, 8), (4, 6), (2, 4), (5, 6)} <= levels
    assert one.state.counts.dispatched == one.state.counts.finished == 10


def test_a_lost_engine_leaves_capacity_and_its_executions_keep_the_waterlevel(
    rows: list[Row],
) -> None:
    place = next(n for n, row in enumerate(rows) if isinstance(row.value, seen.TurnRecorded))
    one = Fold()
    for row in rows[:place]:
        one.apply(row)
    before = one.state.counts.waterlevel
    lost = f.EngineLost(engine=C0, incarnation=1, reason="killed")
    one.apply(Row(seq=place, now_s=9.0, kind="fact", value=lost))
    assert one.state.engines["c0"].role is Role.LOST
    assert one.state.capacity == 6
    assert one.state.counts.waterlevel == before == 5


@pytest.mark.parametrize(("kind", "num_finished"), [(f.CommandUnknown, 0), (f.CommandFailed, 1)])
def test_a_launch_that_failed_is_a_finish_and_one_that_is_unknown_is_not(
    kind: type[f.CommandUnknown] | type[f.CommandFailed], num_finished: int
) -> None:
    dispatch = c.DispatchEval(
        command_id=CommandId(1), reason="", executions=(execution_id(1),), version=0, burst=0
    )
    launch = c.Launch(command_id=CommandId(2), reason="", execution=execution_id(1), engine=C0)
    one = Fold()
    one.apply(Row(seq=1, now_s=0.0, kind="plan", value=c.Plan(commands=(dispatch, launch))))
    answer = kind(command_id=CommandId(2), reason="no space")
    one.apply(Row(seq=2, now_s=1.0, kind="fact", value=answer))
    assert one.state.counts.finished == num_finished


def test_an_execution_cancelled_in_the_queue_is_launched_and_finished_at_once() -> None:
    dispatch = c.DispatchEval(
        command_id=CommandId(1), reason="", executions=(execution_id(1),), version=0, burst=0
    )
    cancel = c.Cancel(
        command_id=CommandId(2), reason="end", execution=execution_id(1), was_queued=True
    )
    one = Fold()
    one.apply(Row(seq=1, now_s=0.0, kind="plan", value=c.Plan(commands=(dispatch, cancel))))
    counts = one.state.counts
    assert (counts.dispatched, counts.launched, counts.finished) == (1, 1, 1)


def test_tokens_of_a_cut_request_that_its_record_lacks_are_counted_as_lost(rows: list[Row]) -> None:
    changed = []
    for row in rows:
        value = row.value
        if isinstance(value, seen.Continued):
            value = seen.Continued(
                execution=value.execution,
                turn=value.turn,
                from_engine="c0",
                to_engine="s0",
                reason="move",
                num_tokens_so_far=8,
            )
        changed.append(replace(row, value=value))
    assert summarise(fold(changed))["tokens_lost"] == 2 * (8 - 6)


def test_an_empty_and_an_unfinished_journal_give_a_summary(rows: list[Row]) -> None:
    assert summarise(fold([]))["reason"] == "the run has not ended"
    half = summarise(fold(rows[: len(rows) // 2]))
    assert half["is_failed"]
    assert half["executions_by_outcome"]["open"] >= 1
    assert half["eval_after"] is None


def test_the_last_words_name_what_the_user_was_promised(state: RunState) -> None:
    lines = final_lines(summarise(state), folder="runs/a", report="runs/a/report.png")
    text = "\n".join(lines)
    for words in (
        "Done in 12 s (seed 7)",
        "0.250 before, 0.750 after (+0.500)",
        "4, 1 mid-batch join, core retained 1, returned 1",
        "2 continued (1 by move, 1 by publication), 1 publication across live requests",
        "their prefixes   1 handed over, 0 recomputed",
        "tokens lost      0",
        "harness errors   0 caused by moves",
        "device-seconds: ",
        "runs/a/report.png",
    ):
        assert words in text
    failed = {**summarise(state), "is_failed": True, "reason": "30 void groups in a row"}
    assert final_lines(failed)[0] == "Failed after 12 s (seed 7): 30 void groups in a row"


STRETCHES = st.lists(
    st.tuples(st.sampled_from(list(Activity)), st.integers(0, 40), st.integers(1, 9)), max_size=12
)


@settings(max_examples=40)
@given(STRETCHES, STRETCHES)
def test_laying_stretches_over_a_lane_never_changes_the_time_covered(
    base: list[tuple[Activity, int, int]], measured: list[tuple[Activity, int, int]]
) -> None:
    lane: list[Stretch] = []
    at_s = 0.0
    for activity, gap, length in base:
        at_s += gap % 3
        extend(lane, activity, at_s, at_s + length)
        at_s += length
    over = [
        Stretch(activity=activity, start_s=float(start), end_s=float(start + length))
        for activity, start, length in measured
    ]
    result = overlay(lane, over)
    assert sum(totals([result]).values()) == pytest.approx(sum(totals([lane]).values()))
    assert all(one.end_s <= two.start_s for one, two in pairwise(result))
    assert overlay(lane, []) == lane


def test_a_stretch_laid_over_a_lane_wins_where_the_lane_is_and_only_there() -> None:
    lane = [
        Stretch(activity=Activity.WAITING_FOR_DATA, start_s=0.0, end_s=4.0),
        Stretch(activity=Activity.MOVING, start_s=4.0, end_s=6.0),
    ]
    over = [Stretch(activity=Activity.TRAINING, start_s=3.0, end_s=9.0)]
    only_data = frozenset({Activity.WAITING_FOR_DATA})
    assert totals([overlay(lane, over)])["training"] == 3.0
    assert totals([overlay(lane, over, over=only_data)])["training"] == 1.0
    assert totals([overlay(lane, over, over=only_data)])["moving"] == 2.0
