"""The claim order near the end of a step: cells finish together."""

from collections.abc import Mapping, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stream_bench.cells import Cell, run_dry
from opengyre.seams.cells import MicroStep
from opengyre.trainer.stream import FINEST, StepStream, StreamSettings
from opengyre.trajectory.bundles import Bundle
from tests.training_rows import alone, line_row

Sizes = list[list[int]]
STEADY = settings(max_examples=40, deadline=None, derandomize=True)


@cache
def _bundle(group: str, member: int, num_tokens: int) -> Bundle:
    (made,) = alone(line_row(f"{group}.{member}", num_tokens, group=group))
    return made


def _groups(sizes: Sequence[Sequence[int]]) -> dict[str, list[Bundle]]:
    return {
        f"g{number}": [_bundle(f"g{number}", member, one) for member, one in enumerate(group)]
        for number, group in enumerate(sizes)
    }


def _stream(
    groups: Mapping[str, Sequence[Bundle]],
    *,
    num_cells: int = 1,
    budget_tokens: int = 64,
    lookahead_groups: int = 2,
    max_groups: int | None = None,
    parts_per_cell: int = 2,
) -> StepStream:
    stream = StepStream(
        0,
        version=0,
        bundles_of=groups.__getitem__,
        settings=StreamSettings(
            budget_tokens=budget_tokens,
            lease_s=1e9,
            max_groups=len(groups) if max_groups is None else max_groups,
            lookahead_groups=lookahead_groups,
            parts_per_cell=parts_per_cell,
        ),
    )
    for cell in range(num_cells):
        assert stream.admit(cell)
    stream.offer(list(groups))
    return stream


def _executions(made: MicroStep | None) -> list[str]:
    return [] if made is None else [path.execution for path in made.paths]


def _mean_load(cells: Sequence[Cell]) -> float:
    return sum(sum(cell.sizes) for cell in cells) / len(cells)


def test_the_last_groups_are_claimed_largest_first_whoever_was_offered_first() -> None:
    stream = _stream(_groups([[3, 5], [9, 2]]), budget_tokens=9)
    first = stream.claim(0, 0.0)
    assert _executions(first.micro_step) == ["g1.0"]
    assert first.assigned == ("g1",)
    second = stream.claim(0, 0.0)
    assert _executions(second.micro_step) == ["g0.1"]
    assert second.assigned == ("g0",)


def test_more_groups_than_are_looked_ahead_keep_the_order_of_their_versions() -> None:
    stream = _stream(_groups([[3], [5], [9]]), budget_tokens=3)
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g0.0"]
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g2.0"]


def test_while_more_groups_may_come_the_order_is_kept() -> None:
    stream = _stream(_groups([[3], [9]]), budget_tokens=9, max_groups=3)
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g0.0"]
    assert stream.claim(0, 0.0).assigned == ("g1",)


def test_a_group_of_which_nothing_was_taken_near_the_end_stays_unassigned() -> None:
    stream = _stream(_groups([[2, 2], [40, 30]]), budget_tokens=40)
    stream.claim(0, 0.0)
    assert stream.assigned == ("g1",)


def test_a_last_group_without_rows_is_assigned_with_the_next_claim() -> None:
    stream = _stream(_groups([[], [4]]))
    claim = stream.claim(0, 0.0)
    assert claim.assigned == ("g0", "g1")
    empty = _stream(_groups([[]]))
    assert empty.claim(0, 0.0).assigned == ("g0",)


def test_near_the_end_a_full_budget_is_shared_by_the_places_of_all_pipelines() -> None:
    stream = _stream(_groups([[4] * 16]), num_cells=4, budget_tokens=64, parts_per_cell=2)
    assert len(stream.claim(0, 0.0).micro_step.token_ids) == 8  # type: ignore[union-attr]
    alone_in_it = _stream(_groups([[4] * 16]), budget_tokens=64, parts_per_cell=2)
    assert len(alone_in_it.claim(0, 0.0).micro_step.token_ids) == 32  # type: ignore[union-attr]


def test_small_bundles_are_left_for_the_end_though_they_would_fit() -> None:
    stream = _stream(_groups([[50, 40, 30, 5]]), budget_tokens=64, parts_per_cell=1)
    taken = [_executions(stream.claim(0, 0.0).micro_step) for _ in range(3)]
    assert taken == [["g0.0"], ["g0.1"], ["g0.2", "g0.3"]]


def test_no_micro_step_is_cut_finer_than_its_floor_while_enough_is_left() -> None:
    stream = _stream(_groups([[2] * 40]), num_cells=8, budget_tokens=8 * FINEST)
    sizes = []
    while (made := stream.claim(0, 0.0).micro_step) is not None:
        sizes.append(len(made.token_ids))
    assert set(sizes) == {8}


def test_a_budget_below_the_floors_divisor_is_no_budget_of_nothing() -> None:
    stream = _stream(_groups([[2, 2]]), num_cells=8, budget_tokens=2)
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g0.0"]


def test_what_a_death_returns_to_a_closed_step_is_shared_by_those_who_are_left() -> None:
    stream = _stream(_groups([[4] * 8]), num_cells=2, budget_tokens=32, parts_per_cell=1)
    lost = stream.claim(1, 0.0).micro_step
    kept = stream.claim(0, 0.0).micro_step
    assert lost is not None
    assert kept is not None
    assert stream.claim(0, 0.0).micro_step is not None
    while stream.claim(0, 0.0).micro_step is not None:
        pass
    stream.close(1)
    stream.drop_member(1)
    again = stream.claim(0, 0.0).micro_step
    assert again is not None
    assert len(again.token_ids) == len(lost.token_ids)
    assert stream.claim(0, 0.0).micro_step is None


def test_cells_of_a_step_of_equal_sizes_end_within_one_finest_micro_step() -> None:
    stream = _stream(_groups([[4] * 8] * 4), num_cells=4, lookahead_groups=4)
    cells = run_dry(stream, [1.0] * 4)
    ends = [cell.ended_s for cell in cells]
    assert max(ends) - min(ends) <= 64 // FINEST


def test_a_cell_with_more_than_its_share_gets_no_more_until_it_has_less() -> None:
    stream = _stream(_groups([[60, 30, 6, 5]]), num_cells=2)
    largest = stream.claim(0, 0.0).micro_step
    assert largest is not None
    waiting = stream.claim(0, 0.0)
    assert waiting.micro_step is None
    assert not waiting.is_refused
    assert _executions(stream.claim(1, 0.0).micro_step) == ["g0.1"]
    assert stream.claim(0, 0.0).micro_step is None
    assert stream.done(0, largest.number)
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g0.2"]


def test_a_cell_that_is_still_joining_keeps_nobody_from_the_last_work() -> None:
    stream = _stream(_groups([[40, 30, 6]]), num_cells=2)
    taken = []
    while (made := stream.claim(0, 0.0).micro_step) is not None:
        taken += _executions(made)
        assert stream.done(0, made.number)
    assert taken == ["g0.0", "g0.1", "g0.2"]


@STEADY
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_one_bundle_at_a_time_is_within_grahams_bound_of_the_best_there_is(
    sizes: list[int], num_cells: int
) -> None:
    stream = _stream(_groups([sizes]), num_cells=num_cells, budget_tokens=1)
    cells = run_dry(stream, [1.0] * num_cells)
    latest_s = max(cell.ended_s for cell in cells)
    bound = 4 / 3 - 1 / (3 * num_cells)
    assert latest_s <= bound * _shortest(sizes, num_cells) + 1e-9


@STEADY
@given(
    st.lists(st.lists(st.integers(2, 90), max_size=9), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 5),
)
def test_no_cell_is_later_than_the_mean_load_and_one_largest_bundle_or_finest_budget(
    sizes: Sizes, num_cells: int, parts_per_cell: int
) -> None:
    stream = _stream(
        _groups(sizes),
        num_cells=num_cells,
        lookahead_groups=len(sizes),
        parts_per_cell=parts_per_cell,
    )
    cells = run_dry(stream, [1.0] * num_cells)
    largest = max((one for group in sizes for one in group), default=0)
    slack = (1 - 1 / num_cells) * max(largest, 64 // FINEST)
    assert max(cell.ended_s for cell in cells) <= _mean_load(cells) + slack + 1e-9
    assert sum(sum(cell.sizes) for cell in cells) == sum(map(sum, sizes))
    assert len(stream.assigned) == len(sizes)


@STEADY
@given(
    st.lists(st.lists(st.integers(2, 90), max_size=6), min_size=1, max_size=5),
    st.lists(st.floats(0.25, 4.0), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_cells_of_any_speed_that_hold_several_claims_end_all_there_is(
    sizes: Sizes, speeds: list[float], claims_per_cell: int, lookahead_groups: int
) -> None:
    groups = _groups(sizes)
    stream = _stream(groups, num_cells=len(speeds), lookahead_groups=lookahead_groups)
    cells = run_dry(stream, speeds, claims_per_cell=claims_per_cell)
    stream.close(len(groups))
    assert stream.is_drained
    num_tokens = sum(one.cost_tokens for bundles in groups.values() for one in bundles)
    assert sum(sum(cell.sizes) for cell in cells) == num_tokens
    assert stream.done_counts().num_tokens == num_tokens - sum(map(len, groups.values()))


@pytest.mark.parametrize("num_cells", [2, 4, 8])
def test_cells_end_earlier_and_closer_together_than_in_the_order_of_arrival(num_cells: int) -> None:
    spreads, lates = [0.0, 0.0], [0.0, 0.0]
    for turn in range(6):
        sizes = [[2 + (7 * k * k + 13 * g * (g + turn)) % 60 for k in range(8)] for g in range(12)]
        for at, lookahead in enumerate((0, len(sizes))):
            stream = _stream(_groups(sizes), num_cells=num_cells, lookahead_groups=lookahead)
            cells = run_dry(stream, [1.0] * num_cells)
            ends = [cell.ended_s for cell in cells]
            spreads[at] += max(ends) - min(ends)
            lates[at] += max(ends) - _mean_load(cells)
    assert spreads[1] < spreads[0] / 2
    assert lates[1] < lates[0] / 2


def _shortest(sizes: Sequence[int], num_cells: int) -> int:
    """The shortest time in which `num_cells` can do all `sizes`, each whole, by trying."""
    loads = {(0,) * num_cells}
    for size in sizes:
        loads = {
            tuple(sorted((*one[:k], one[k] + size, *one[k + 1 :])))
            for one in loads
            for k in range(num_cells)
        }
    return min(one[-1] for one in loads)
