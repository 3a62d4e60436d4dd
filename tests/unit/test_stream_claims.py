from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep
from opengyre.trainer.stream import CellCounters, StepStream, StreamSettings
from opengyre.trajectory.bundles import Bundle
from tests.training_rows import alone, line_row


def _bundles(group: str, lengths: list[int], *, is_counted_only: bool = False) -> list[Bundle]:
    return alone(
        *(
            line_row(f"{group}.{index}", length, group=group, is_counted_only=is_counted_only)
            for index, length in enumerate(lengths)
        )
    )


GROUPS = {
    "g1": _bundles("g1", [4, 4, 4]),
    "g2": _bundles("g2", [6, 6]),
    "g3": _bundles("g3", []),
    "g4": _bundles("g4", [30, 2]),
    "g5": _bundles("g5", [5, 5], is_counted_only=True),
    "g6": _bundles("g6", [3]),
}


def _stream(*, budget: int = 8, cells: tuple[int, ...] = (0, 1)) -> StepStream:
    stream = StepStream(
        5,
        version=4,
        bundles_of=GROUPS.__getitem__,
        settings=StreamSettings(budget_tokens=budget, lease_s=10.0, max_groups=6),
    )
    for cell in cells:
        assert stream.admit(cell)
    return stream


def _executions(made: MicroStep | None) -> list[str]:
    assert made is not None
    return [path.execution for path in made.paths]


def test_claims_are_disjoint_in_order_and_assign_a_group_at_its_first_micro_step() -> None:
    stream = _stream()
    stream.offer(["g1", "g2"])
    first = stream.claim(0, 0.0)
    assert _executions(first.micro_step) == ["g1.0", "g1.1"]
    assert first.assigned == ("g1",)
    second = stream.claim(1, 0.0)
    assert _executions(second.micro_step) == ["g1.2"]
    assert second.assigned == ()
    third = stream.claim(0, 0.0)
    assert _executions(third.micro_step) == ["g2.0"]
    assert third.assigned == ("g2",)
    assert stream.assigned == ("g1", "g2")


def test_a_micro_step_names_its_step_and_version_and_numbers_never_repeat() -> None:
    stream = _stream()
    stream.offer(["g1"])
    one = stream.claim(0, 0.0).micro_step
    assert one is not None
    assert (one.step, one.version, one.number) == (5, 4, 0)
    stream.drop_member(0)
    stream.offer(["g1"])
    again = stream.claim(1, 0.0).micro_step
    assert again is not None
    assert again.number == 1


def test_a_ready_group_that_nobody_claimed_stays_unassigned() -> None:
    stream = _stream()
    stream.offer(["g4", "g2"])
    stream.claim(0, 0.0)
    assert stream.assigned == ("g4",)


def test_a_group_without_trainable_rows_is_assigned_when_it_is_reached() -> None:
    stream = _stream()
    stream.offer(["g3"])
    claim = stream.claim(0, 0.0)
    assert claim.micro_step is None
    assert claim.assigned == ("g3",)


def test_a_group_without_variance_is_counted_by_a_micro_step_without_tokens() -> None:
    stream = _stream()
    stream.offer(["g5"])
    made = stream.claim(0, 0.0).micro_step
    assert made is not None
    assert made.token_ids == []
    stream.done(0, made.number)
    assert stream.done_counts().num_executions == 2.0
    assert stream.done_counts().num_tokens == 0


def test_the_last_offer_replaces_the_one_before() -> None:
    stream = _stream()
    stream.offer(["g1"])
    stream.offer(["g2"])
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g2.0"]
    stream.offer(["g2", "g1"])
    assert stream.claim(0, 0.0).assigned == ()


def test_a_death_returns_claimed_and_done_work_and_names_groups_that_came_back_whole() -> None:
    stream = _stream()
    stream.offer(["g1", "g2"])
    stream.claim(0, 0.0)
    lost = stream.claim(1, 0.0).micro_step
    assert lost is not None
    stream.done(1, lost.number)
    assert _executions(stream.claim(1, 0.0).micro_step) == ["g2.0"]
    assert stream.drop_member(1) == ("g2",)
    assert stream.assigned == ("g1",)
    assert stream.counters(1).num_returned == 2
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g1.2"]
    assert stream.claim(0, 0.0).micro_step is None
    stream.offer(["g2"])
    assert stream.claim(0, 0.0).assigned == ("g2",)


def test_in_a_closed_step_a_death_reopens_claims_but_gives_no_group_back() -> None:
    stream = _stream()
    stream.offer(["g6"])
    made = stream.claim(1, 0.0).micro_step
    assert made is not None
    stream.close(1)
    stream.done(1, made.number)
    assert stream.is_drained
    assert stream.drop_member(1) == ()
    assert not stream.is_drained
    redone = stream.claim(0, 0.0).micro_step
    assert _executions(redone) == ["g6.0"]
    assert redone is not None
    stream.done(0, redone.number)
    assert stream.is_drained
    assert stream.done_counts().micro_steps == [redone.number]


def test_a_dropped_cell_is_refused_and_counted_whatever_it_says() -> None:
    stream = _stream()
    stream.offer(["g1"])
    made = stream.claim(1, 0.0).micro_step
    assert made is not None
    stream.drop_member(1)
    assert stream.claim(1, 0.0).is_refused
    assert not stream.done(1, made.number)
    assert not stream.admit(1)
    assert stream.counters(1).num_refused == 3


def test_a_done_of_another_cell_or_a_second_one_is_refused() -> None:
    stream = _stream()
    stream.offer(["g1"])
    made = stream.claim(1, 0.0).micro_step
    assert made is not None
    assert not stream.done(0, made.number)
    assert stream.done(1, made.number)
    assert not stream.done(1, made.number)
    assert stream.counters(1).num_done == 1


def test_only_a_claim_past_its_lease_makes_a_cell_overdue() -> None:
    stream = _stream()
    stream.offer(["g1"])
    made = stream.claim(1, 100.0).micro_step
    assert made is not None
    assert stream.overdue(110.0) == ()
    assert stream.overdue(110.1) == (1,)
    stream.done(1, made.number)
    assert stream.overdue(1e9) == ()


def _numbers(stream: StepStream, cell: int, num: int, now_s: float) -> list[int]:
    """`cell` claims `num` micro-steps at once."""
    made = [stream.claim(cell, now_s).micro_step for _ in range(num)]
    return [one.number for one in made if one is not None]


def test_a_claim_is_not_overdue_for_waiting_behind_another_of_its_cell() -> None:
    stream = _stream(budget=4)
    stream.offer(["g1"])
    first, second, third = _numbers(stream, 1, 3, 0.0)
    assert stream.done(1, first, 9.0)
    assert stream.overdue(18.9) == ()
    assert stream.done(1, second, 18.9)
    assert stream.overdue(28.8) == ()
    assert stream.overdue(29.0) == (1,)
    assert stream.done(1, third, 30.0)
    assert stream.overdue(1e9) == ()


def test_a_claim_long_after_the_one_before_it_has_its_whole_lease() -> None:
    stream = _stream(budget=4)
    stream.offer(["g1"])
    first, _ = _numbers(stream, 1, 2, 0.0)
    stream.done(1, first, 1.0)
    assert stream.overdue(11.1) == (1,)
    (other,) = _numbers(stream, 0, 1, 100.0)
    assert stream.overdue(109.9) == (1,)
    stream.done(0, other, 109.9)
    assert stream.overdue(1e9) == (1,)


def test_a_lease_that_ends_between_the_end_and_its_telling_harms_no_other_cell() -> None:
    stream = _stream(budget=4)
    stream.offer(["g1", "g2"])
    (slow,) = _numbers(stream, 0, 1, 0.0)
    (fast,) = _numbers(stream, 1, 1, 9.0)
    assert stream.overdue(10.5) == (0,)
    assert not stream.drop_member(0)
    assert not stream.done(0, slow, 10.6)
    assert stream.done(1, fast, 10.7)
    left = [stream.claim(1, 11.0).micro_step for _ in range(5)]
    executions = [path.execution for one in left if one is not None for path in one.paths]
    assert sorted(executions) == ["g1.0", "g1.2", "g2.0", "g2.1"]
    assert stream.counters(0).num_refused == 1


def test_done_in_time_though_its_cell_is_looked_at_late_is_done() -> None:
    stream = _stream(budget=4)
    stream.offer(["g1"])
    (made,) = _numbers(stream, 0, 1, 0.0)
    assert stream.done(0, made, 10.1)
    assert stream.overdue(10.2) == ()


def test_what_a_member_held_in_its_pipeline_comes_back_with_what_it_did() -> None:
    stream = _stream(budget=4)
    stream.offer(["g1"])
    first, *_ = _numbers(stream, 1, 3, 0.0)
    stream.done(1, first, 1.0)
    stream.close(1)
    assert not stream.is_drained
    assert stream.drop_member(1) == ()
    assert stream.counters(1).num_returned == 3
    again = [stream.claim(0, 2.0).micro_step for _ in range(4)]
    executions = [path.execution for one in again if one is not None for path in one.paths]
    assert sorted(executions) == ["g1.0", "g1.1", "g1.2"]
    assert {one.number for one in again if one is not None}.isdisjoint({0, 1, 2})


def test_a_recalled_cell_gives_back_what_nobody_else_began_and_counts_no_more() -> None:
    stream = _stream(budget=8)
    stream.offer(["g2", "g6"])
    _numbers(stream, 0, 1, 0.0)
    _numbers(stream, 1, 2, 0.0)
    assert list(stream.assigned) == ["g2", "g6"]
    assert stream.drop_member(1) == ("g6",)
    assert list(stream.assigned) == ["g2"]
    assert stream.members == (0,)
    stream.offer(["g6"])
    assert stream.claim(1, 1.0).is_refused
    made = stream.claim(0, 1.0)
    assert _executions(made.micro_step) == ["g2.1"]


def test_counters_tell_of_every_cell_that_was_ever_there() -> None:
    stream = _stream(budget=4)
    stream.offer(["g1"])
    first, _ = _numbers(stream, 1, 2, 0.0)
    stream.done(1, first, 0.5)
    stream.drop_member(1)
    stream.done(1, first, 1.0)
    told = {cell: _counts(one) for cell, one in stream.all_counters()}
    assert told == {0: (0, 0, 0, 0, 0), 1: (2, 1, 4, 2, 1)}


def _counts(one: CellCounters) -> tuple[int, ...]:
    return (
        one.num_claimed,
        one.num_done,
        one.num_tokens_done,
        one.num_returned,
        one.num_refused,
    )


def test_closing_with_another_number_of_groups_is_our_fault() -> None:
    stream = _stream()
    stream.offer(["g1"])
    stream.claim(0, 0.0)
    with pytest.raises(InvariantError, match="2 groups, 1 assigned"):
        stream.close(2)
    stream.close(1)
    with pytest.raises(InvariantError, match="closed but was offered g2"):
        stream.offer(["g2"])


def test_never_more_than_a_batch_of_groups_is_assigned() -> None:
    stream = StepStream(
        0,
        version=0,
        bundles_of=GROUPS.__getitem__,
        settings=StreamSettings(budget_tokens=1000, lease_s=1.0, max_groups=2),
    )
    stream.admit(0)
    stream.offer(["g1", "g2", "g6"])
    assert stream.claim(0, 0.0).assigned == ("g1", "g2")
    assert stream.claim(0, 0.0).micro_step is None


class StreamUnderDeaths(RuleBasedStateMachine):
    """Cells join, claim, finish and die in any order; each row must end in one living sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = _stream(cells=(0,))
        self.next_cell = 1
        self.cells = [0]
        self.held: dict[int, list[MicroStep]] = {0: []}
        self.sums: dict[int, Counter[str]] = {0: Counter()}
        self.unassigned = list(GROUPS)
        self.stream.offer(self.unassigned)

    @precondition(lambda self: not self.stream.is_closed and len(self.cells) < 4)
    @rule()
    def join(self) -> None:
        assert self.stream.admit(self.next_cell)
        self.cells.append(self.next_cell)
        self.held[self.next_cell] = []
        self.sums[self.next_cell] = Counter()
        self.next_cell += 1

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(self.cells))
        claim = self.stream.claim(cell, 0.0)
        for group in claim.assigned:
            self.unassigned.remove(group)
        if claim.micro_step is not None:
            self.held[cell].append(claim.micro_step)
        if not self.unassigned and not self.stream.is_closed:
            self.stream.close(len(GROUPS))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(self.cells))
        if self.held[cell]:
            made = self.held[cell].pop(0)
            assert self.stream.done(cell, made.number)
            self.sums[cell].update(path.execution for path in made.paths)

    @precondition(lambda self: len(self.cells) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(self.cells[1:]))
        self.cells.remove(cell)
        back = self.stream.drop_member(cell)
        self.unassigned += back
        if back:
            self.stream.offer(self.unassigned)

    @invariant()
    def a_drained_step_has_each_row_once(self) -> None:
        total: Counter[str] = Counter()
        for cell in self.cells:
            total.update(self.sums[cell])
        assert all(times == 1 for times in total.values())
        if self.stream.is_drained:
            assert set(total) == {
                one.rows[0].execution for bundles in GROUPS.values() for one in bundles
            }

    def teardown(self) -> None:
        for cell in self.cells:
            for made in self.held[cell]:
                self.stream.done(cell, made.number)
                self.sums[cell].update(path.execution for path in made.paths)
            self.held[cell] = []
        while not self.stream.is_drained:
            claim = self.stream.claim(0, 0.0)
            for group in claim.assigned:
                self.unassigned.remove(group)
            if claim.micro_step is not None:
                self.stream.done(0, claim.micro_step.number)
                self.sums[0].update(one.execution for one in claim.micro_step.paths)
            if not self.unassigned and not self.stream.is_closed:
                self.stream.close(len(GROUPS))
        self.a_drained_step_has_each_row_once()


TestStreamUnderDeaths = StreamUnderDeaths.TestCase
TestStreamUnderDeaths.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True
)
