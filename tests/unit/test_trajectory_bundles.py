"""Which rows go through the model together."""

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.trajectory.bundles import Bundle, Layout, Row, bundles_of
from tests.random_trees import Grower, Start, random_selection, random_tree, rows_of
from tests.training_rows import line_row

SEEDS = st.integers(0, 2**32 - 1)


def _rows(seed: int, *, max_paths: int = 0) -> list[Row]:
    numbers = np.random.default_rng(seed)
    tree = random_tree(numbers, num_turns=int(numbers.integers(1, 14)))
    return rows_of(random_selection(tree, numbers, max_paths=max_paths))


def _num_unique(rows: Sequence[Row]) -> int:
    """Tokens of the union, one by one."""
    return len(
        {
            (piece.node.index, depth)
            for row in rows
            for piece in row.path.pieces
            for depth in range(piece.begin, piece.end)
        }
    )


def _tree(rows: Sequence[Row], budget_tokens: int) -> list[Bundle]:
    return bundles_of(rows, layout=Layout.TREE, budget_tokens=budget_tokens)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, budget_tokens=st.integers(1, 80))
def test_a_cut_tree_keeps_every_row_once_and_a_bundle_of_rows_to_the_budget(
    seed: int, budget_tokens: int
) -> None:
    rows = _rows(seed)
    bundles = _tree(rows, budget_tokens)
    kept = [id(row) for bundle in bundles for row in bundle.rows]
    assert sorted(kept) == sorted(id(row) for row in rows)
    for bundle in bundles:
        assert bundle.cost_tokens == _num_unique(bundle.rows)
        assert bundle.cost_tokens <= budget_tokens or len(bundle.rows) == 1
        assert bundle.num_path_tokens == sum(row.path.num_tokens for row in bundle.rows)


def _contiguous(rows: Sequence[Row]) -> Iterator[list[Sequence[Row]]]:
    for cuts in range(2 ** max(0, len(rows) - 1)):
        inner = [k for k in range(1, len(rows)) if cuts >> (k - 1) & 1]
        yield [rows[a:b] for a, b in pairwise([0, *inner, len(rows)])]


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, budget_tokens=st.integers(1, 60))
def test_no_cut_between_neighbours_computes_fewer_tokens(seed: int, budget_tokens: int) -> None:
    rows = _rows(seed, max_paths=7)
    ordered = sorted(rows, key=lambda row: [piece.node.index for piece in row.path.pieces])
    costs = (
        [_num_unique(part) for part in parts]
        for parts in _contiguous(ordered)
        if all(len(part) == 1 or _num_unique(part) <= budget_tokens for part in parts)
    )
    best = min(((sum(one), len(one)) for one in costs), default=(0, 0)) if rows else (0, 0)
    bundles = _tree(rows, budget_tokens)
    assert (sum(one.cost_tokens for one in bundles), len(bundles)) == best


def test_a_cut_parts_the_branches_that_share_least() -> None:
    grower = Grower(np.random.default_rng(1))
    root = grower.add(None, Start.ROOT, num_injected=10, num_sampled=1)
    for _ in range(2):
        trunk = grower.add(root, Start.WHOLE, num_injected=20, num_sampled=1)
        for _ in range(2):
            grower.add(trunk, Start.WHOLE, num_injected=3, num_sampled=2)
    rows = rows_of(random_selection(grower.tree, np.random.default_rng(2)))
    assert [one.cost_tokens for one in _tree(rows, 73)] == [73]
    assert [one.cost_tokens for one in _tree(rows, 72)] == [42, 42]
    assert [one.cost_tokens for one in _tree(rows, 41)] == [37] * 4


def test_path_by_path_each_row_goes_alone_at_its_own_cost() -> None:
    rows = _rows(3)
    bundles = bundles_of(rows, layout=Layout.PATH, budget_tokens=1)
    assert [one.rows for one in bundles] == [(row,) for row in rows]
    assert [one.cost_tokens for one in bundles] == [row.path.num_tokens for row in rows]


def test_rows_that_are_only_counted_cost_nothing_and_stay_in_one_bundle() -> None:
    rows = [line_row("e1", 50, is_counted_only=True), line_row("e1", 40, is_counted_only=True)]
    (bundle,) = _tree(rows, 10)
    assert (bundle.cost_tokens, bundle.num_path_tokens, len(bundle.rows)) == (0, 0, 2)


def test_no_rows_make_no_bundle() -> None:
    assert _tree([], sys.maxsize) == []
