"""Each promise that `verify` checks: a whole run keeps it, and a planted violation is found."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_run import C0, C1, S0, Tape, dispatch, record

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.ids import execution_id, group_id
from opengyre.seams.records import SegmentRef, Span
from opengyre.store import observations as seen
from opengyre.store.segments import SegmentReader, SegmentWriter
from tests.planting import Planting


@pytest.fixture
def run(tmp_path: Path) -> Planting:
    tape: Tape = record(tmp_path)
    return Planting(rows=tape.rows, tokens=tmp_path)


def test_a_whole_run_keeps_every_promise_and_says_how_much_was_checked(run: Planting) -> None:
    results = run.results()
    assert list(results) == [
        *("P1", "P2", "P3", "P4", "P5", "P6", "P8", "P10", "P11", "P12", "P16"),
    ]
    assert {name: one.problems for name, one in results.items() if one.problems} == {}
    checked = {name: one.num_checked for name, one in results.items()}
    assert checked == {
        "P1": 10,
        "P2": len(run.rows),
        "P3": checked["P3"],
        "P4": 5,
        "P5": 11,
        "P6": 1,
        "P8": 5,
        "P10": 8,
        "P11": 10,
        "P12": 10,
        "P16": 1,
    }
    assert checked["P3"] > 50
    assert results["P1"].notes == ()
    totals = ("66 tokens sampled = 54 trained + 0 masked + 12 dropped", "dropped: 12 evaluation")
    assert results["P11"].notes == totals


def no_outcome(run: Planting) -> None:
    run.drop(run.where(f.ExecutionClosed, execution=execution_id(3))[0])


def two_outcomes(run: Planting) -> None:
    place = run.where(f.ExecutionClosed, execution=execution_id(3))[0]
    run.insert(place + 1, f.ExecutionClosed(execution=execution_id(3), outcome=f.Outcome.LOST))


def outcome_of_a_stranger(run: Planting) -> None:
    run.insert(20, f.ExecutionClosed(execution=execution_id(99), outcome=f.Outcome.LOST))


def finished_before_launched(run: Planting) -> None:
    for number in range(1, 6):
        run.drop(run.command(c.Launch, execution=execution_id(number)))


def dispatch_inside_a_burst(run: Planting) -> None:
    kind, fields = dispatch(0, 50)
    run.insert_plan(run.command(c.CloseStep), kind, **fields)


def dispatched_twice(run: Planting) -> None:
    kind, fields = dispatch(1, 6)
    place = run.command(c.DispatchGroups, burst=1)
    run.insert_plan(place + 1, kind, **fields)


def other_counters(run: Planting) -> None:
    run.change(run.where(seen.SchedulerCounts)[0], num_finished=1)


def leaves_uncovered(run: Planting) -> None:
    run.change(
        0,
        engines=[
            seen.EngineSlots(engine="c0", cell=0, slots=4),
            seen.EngineSlots(engine="c1", cell=1, slots=2),
            seen.EngineSlots(engine="s0", cell=None, slots=1),
        ],
    )


def dispatch_while_a_cell_trains(run: Planting) -> None:
    kind, fields = dispatch(0, 50)
    run.insert_plan(run.command(c.EnterTraining, cell=0) + 1, kind, **fields)


def leaves_while_another_moves(run: Planting) -> None:
    first = run.command(c.CloseDoor, engine=C0)
    run.insert_plan(first + 2, c.CloseDoor, engine=C1)


def second_cell_leaves_first(run: Planting) -> None:
    first = run.command(c.CloseDoor, engine=C0)
    run.insert_plan(first, c.EnterTraining, cell=1)


def core_returns_before_its_satellite(run: Planting) -> None:
    place = run.where(seen.MemberJoined)[0]
    run.insert_plan(place + 1, c.LeaveTraining, cell=0, version=0)


def member_outside_training(run: Planting) -> None:
    run.insert(run.where(f.GroupAssigned)[0], f.MemberAdmitted(step=0, cell=1))


def span_gap(run: Planting) -> None:
    (place,) = [n for n in run.where(seen.TurnRecorded) if run.turn(n).turn == "e000002.t0"]
    first, second = run.turn(place).spans
    shorter = msgspec.structs.replace(first, end=1)
    run.change_turn("e000002.t0", spans=[shorter, second])


def lost_parent_tokens(run: Planting) -> None:
    run.change_turn("e000001.t1", num_kept_tokens=8)


def damaged_bytes(run: Planting) -> None:
    path = run.tokens / "0000.seg"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_without_a_record(run: Planting) -> None:
    place = run.where(seen.Continued)[0]
    run.change(place, turn="e000002.t9")


def cut_at_another_place(run: Planting) -> None:
    run.change(run.where(seen.Continued)[0], num_tokens_so_far=3)


def continued_at_another_engine(run: Planting) -> None:
    run.change(run.where(seen.Continued)[0], to_engine="c1")


def lost_the_last_token(run: Planting) -> None:
    run.change(run.where(seen.Continued)[0], num_tokens_so_far=7)


def cut_never_told(run: Planting) -> None:
    run.drop(run.where(seen.Continued)[1])


def error_from_a_move(run: Planting) -> None:
    run.insert(40, seen.HarnessError(execution="e000002", kind="503", during_move=True))


def micro_step_twice(run: Planting) -> None:
    place = run.where(seen.MicroStepDone, step=0, number=1)[0]
    run.insert(place + 1, run.rows[place].value)


def micro_step_not_summed(run: Planting) -> None:
    run.change(run.where(seen.StepReport)[0], micro_steps=[0, 2])


def returned_micro_step_counted(run: Planting) -> None:
    place = run.command(c.CloseStep)
    run.insert(place, seen.MicroStepReturned(step=0, number=2, cell=1))


def path_trained_twice(run: Planting) -> None:
    first, second = run.where(seen.MicroStepDone, step=1)
    value: Any = run.rows[first].value
    run.change(second, paths=value.paths)


def group_consumed_twice(run: Planting) -> None:
    second = run.where(seen.StepReport)[1]
    run.change(second, groups=[group_id(1), group_id(6), group_id(8)])


def group_not_consumed(run: Planting) -> None:
    run.change(run.where(seen.StepReport)[1], groups=[group_id(6)])


def other_ids_trained(run: Planting) -> None:
    run.change_path(ids_crc32=12345)


def prompt_trained(run: Planting) -> None:
    run.change_path(trained=[(0, 6)])


def other_logprobs(run: Planting) -> None:
    run.change_path(logprobs_crc32=1)


def uncommitted_turn_trained(run: Planting) -> None:
    for name in ("e000001.t1",):
        run.change_turn(name, is_committed=False)


PLANTED: list[tuple[Callable[[Planting], None], str, str]] = [
    (no_outcome, "P1", "e000003 has no outcome"),
    (two_outcomes, "P1", "e000003 closed as completed and lost"),
    (outcome_of_a_stranger, "P1", "e000099 was never dispatched"),
    (finished_before_launched, "P2", "0 <= f <= p <= d broken"),
    (dispatch_inside_a_burst, "P2", "w rises from"),
    (dispatched_twice, "P2", "an execution is dispatched twice"),
    (
        other_counters,
        "P2",
        "the scheduler counts d, p, f as (5, 5, 1), the journal gives (5, 5, 0)",
    ),
    (leaves_uncovered, "P3", "cell 0 leaves with w = 4 and 3 slots left"),
    (dispatch_while_a_cell_trains, "P3", "slots while cells leave or train"),
    (leaves_while_another_moves, "P3", "while a transition of [0, 1] is under way"),
    (second_cell_leaves_first, "P4", "cells [1] leave or train, the living cells are [0, 1]"),
    (core_returns_before_its_satellite, "P4", "cell 0 stops training inside a burst, before 1"),
    (member_outside_training, "P4", "cell 1 is a member of step 0 but not in training"),
    (span_gap, "P5", "e000002.t0 attempt 1: the segment's header differs"),
    (lost_parent_tokens, "P5", "e000001.t1 attempt 1: the segment's header differs"),
    (damaged_bytes, "P5", "damaged record"),
    (cut_without_a_record, "P5", "e000002.t9: was continued elsewhere and never recorded"),
    (cut_at_another_place, "P5", "cut after 3 tokens at c0, sampled at s0"),
    (continued_at_another_engine, "P5", "continued after 2 tokens at c1, sampled at s0"),
    (lost_the_last_token, "P5", "had 7 tokens when it was cut, 6 are recorded"),
    (cut_never_told, "P5", "0 continuations told, 1 recorded"),
    (error_from_a_move, "P5", "e000002 got an error from a move: 503"),
    (micro_step_twice, "P8", "step 0, micro-step 1: done 2 and summed 1 times"),
    (micro_step_not_summed, "P8", "step 0, micro-step 1: done 1 and summed 0 times"),
    (returned_micro_step_counted, "P8", "micro-step 2: done 0 and summed 1 times"),
    (path_trained_twice, "P8", "a path of e000006 was trained 2 times"),
    (group_consumed_twice, "P8", "g00001 was consumed 2 times"),
    (group_not_consumed, "P8", "step 1 trained g00008, which it did not consume"),
    (other_ids_trained, "P10", "no committed turn has these ids"),
    (prompt_trained, "P10", "trains [0, 6), where the policy did not sample all tokens"),
    (other_logprobs, "P10", "its sampling logprobs are not the engine's"),
    (uncommitted_turn_trained, "P10", "no committed turn has these ids"),
]


@pytest.mark.parametrize(
    ("plant", "promise", "words"), PLANTED, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_planted_violation_is_found_and_named(
    run: Planting, plant: Callable[[Planting], None], promise: str, words: str
) -> None:
    plant(run)
    result = run.results()[promise]
    assert not result.is_kept
    assert any(words in one for one in result.problems), result.problems
    assert "FAIL" in result.line()


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0, 1, 0), (2, 6, 0)], "a span [2, 6) does not go on at 1"),
        ([(0, 4, 0), (3, 6, 0)], "a span [3, 6) does not go on at 4"),
        ([(0, 5, 0)], "spans cover 5 of 6 tokens"),
        ([(0, 3, 2), (3, 6, 1)], "version 1 samples after version 2"),
    ],
)
def test_a_lost_or_repeated_token_is_found_where_segment_and_journal_agree(
    run: Planting, spans: list[tuple[int, int, int]], words: str
) -> None:
    (place,) = [n for n in run.where(seen.TurnRecorded) if run.turn(n).turn == "e000004.t0"]
    told = [
        Span(start=start, end=end, policy_version=version, engine="s0")
        for start, end, version in spans
    ]
    changed = msgspec.structs.replace(run.turn(place), spans=told)
    record = SegmentReader(run.tokens).read(run.turn(place).ref)

    async def rewrite() -> SegmentRef:
        writer = SegmentWriter(run.tokens)
        ref = writer.append(msgspec.structs.replace(record, header=changed))
        await writer.close()
        return ref

    run.change_turn("e000004.t0", spans=told, ref=asyncio.run(rewrite()))
    problems = run.results()["P5"].problems
    assert problems == (f"e000004.t0 attempt 1: {words}",)


def test_a_lost_engine_excuses_missing_coverage_but_nothing_more_may_leave(run: Planting) -> None:
    place = run.where(f.GroupAssigned)[0]
    run.insert(place, f.EngineLost(engine=S0, incarnation=1, reason="killed"))
    results = run.results()
    assert any("cell 1 leaves with w = " in one for one in results["P3"].problems)
    assert results["P3"].num_problems == 1


def test_the_death_of_a_satellite_may_shrink_the_training_set_inside_a_burst(run: Planting) -> None:
    place = run.command(c.CloseStep)
    run.insert(place, f.EngineLost(engine=C1, incarnation=1, reason="killed"))
    assert run.results()["P4"].problems == ()


def test_an_abandoned_step_counts_only_from_its_second_opening(run: Planting) -> None:
    place = run.where(seen.MicroStepDone)[0]
    value: Any = run.rows[place].value
    again = run.command(c.OpenStep)
    run.insert(again, value)
    assert run.results()["P8"].problems == ()


def test_repeated_equal_outcomes_are_counted_not_broken(run: Planting) -> None:
    place = run.where(f.ExecutionClosed)[0]
    run.insert(place + 1, run.rows[place].value)
    result = run.results()["P1"]
    assert result.is_kept
    assert result.notes == ("1 repeated outcomes were refused",)
