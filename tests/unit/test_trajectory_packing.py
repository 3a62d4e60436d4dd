"""From bundles to flat micro-steps, with nothing lost and first-fit decreasing's filling."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.trajectory.bundles import Bundle, Layout, bundles_of
from opengyre.trajectory.packing import Filling, PackedRows, pack, sort_for_packing
from opengyre.trajectory.selection import Range
from opengyre.trajectory.tree import line_ids
from tests.random_trees import random_selection, random_tree, rows_of
from tests.training_rows import alone, line_logprobs, line_row, trained_depths

SEEDS = st.integers(0, 2**32 - 1)


def _bundles(seed: int) -> list[Bundle]:
    """Several executions, cut and whole, in both layouts."""
    numbers = np.random.default_rng(seed)
    bundles: list[Bundle] = []
    for layout in (*Layout, Layout.TREE):
        tree = random_tree(numbers, num_turns=int(numbers.integers(1, 12)))
        rows = rows_of(random_selection(tree, numbers))
        bundles += bundles_of(rows, layout=layout, budget_tokens=int(numbers.integers(5, 90)))
    return bundles


def _flat(ranges: Sequence[Range]) -> list[int]:
    return [at for begin, end in ranges for at in range(begin, end)]


def _seen_by(packed: PackedRows) -> list[list[int]]:
    """Of each flat token: the flat tokens that it sees, itself last."""
    seen: list[list[int]] = []
    for one in packed.segments:
        assert one.start == len(seen) < one.end
        before = _flat(one.ancestors)
        seen += [[*before, *range(one.start, at + 1)] for at in range(one.start, one.end)]
    return seen


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_every_token_of_a_path_sees_what_the_engine_saw_before_it(seed: int) -> None:
    bundles = _bundles(seed)
    packed = pack(bundles)
    seen = _seen_by(packed)
    assert [one.row for one in packed.paths] == [row for one in bundles for row in one.rows]
    for one in packed.paths:
        line = _flat(one.pieces)
        path = one.row.path
        assert packed.token_ids[line].tolist() == line_ids(path.leaf).tolist()
        assert packed.position_ids[line].tolist() == list(range(path.num_tokens))
        assert packed.logprobs[line].tolist() == line_logprobs(path)
        assert all(seen[at] == line[: depth + 1] for depth, at in enumerate(line))
        assert _flat(one.trained) == [line[depth] for depth in trained_depths(path)]


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_a_bundle_takes_what_it_costs_and_no_token_is_trained_twice(seed: int) -> None:
    bundles = _bundles(seed)
    packed = pack(bundles)
    assert len(packed.token_ids) == sum(one.cost_tokens for one in bundles)
    trained = [at for one in packed.paths for at in _flat(one.trained)]
    assert len(trained) == len(set(trained)) == sum(one.row.num_path_tokens for one in packed.paths)


def test_a_counted_only_row_has_a_path_and_no_tokens() -> None:
    packed = pack(alone(line_row("a", 3, is_counted_only=True), line_row("b", 2)))
    assert [(one.start, one.end) for one in packed.segments] == [(0, 2)]
    assert [one.pieces for one in packed.paths] == [(), ((0, 2),)]
    assert packed.token_ids.tolist() == [0, 1]


def _first_fit_decreasing(bundles: Sequence[Bundle], budget_tokens: int) -> list[list[Bundle]]:
    """The textbook's: each, by falling size, into the first bin with room, else a new one."""
    bins: list[list[Bundle]] = []
    for one in sorted(bundles, key=lambda one: -one.cost_tokens):
        for bin_ in bins:
            if sum(other.cost_tokens for other in bin_) + one.cost_tokens <= budget_tokens:
                bin_.append(one)
                break
        else:
            bins.append([one])
    return bins


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=20),
    num_counted=st.integers(0, 2),
    budget_tokens=st.integers(1, 60),
)
def test_fillings_one_after_another_are_first_fit_decreasing(
    sizes: list[int], num_counted: int, budget_tokens: int
) -> None:
    rows = [line_row(f"e{n}", size + 1) for n, size in enumerate(sizes)]
    rows += [line_row(f"c{n}", 9, is_counted_only=True) for n in range(num_counted)]
    bundles = alone(*rows)
    waiting = list(bundles)
    sort_for_packing(waiting)
    taken: list[list[Bundle]] = []
    while waiting:
        filling = Filling(budget_tokens=budget_tokens)
        filling.take_from(waiting)
        taken.append(filling.bundles)
    assert taken == _first_fit_decreasing(bundles, budget_tokens)


def test_a_bundle_over_the_budget_goes_alone() -> None:
    long, short = alone(line_row("long", 9), line_row("short", 3))
    filling = Filling(budget_tokens=5)
    waiting = [long, short]
    filling.take_from(waiting)
    assert (filling.bundles, waiting, filling.num_tokens) == ([long], [short], 9)
