"""Rows of one execution that go through the model together: path by path, or as a tree.

Owns: which rows share their common beginnings, and what that costs. Must not know micro-steps.
Invariants: a tree's token is computed once; all tokens that a row trains are in its bundle, so that
what is summed over a path is whole; a bundle keeps to the budget unless it is one row; of all cuts
between neighbours those are made that compute the fewest tokens twice.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from opengyre.trajectory.selection import Path


class Layout(StrEnum):
    """PATH: each path is computed from its first token. TREE: what paths share, once."""

    PATH = "path"
    TREE = "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One path to train: its execution's A_e and T_e beside it; T_j is the path's.

    `is_counted_only`: its gradient is zero for certain (no variance in its group), so it is not
    computed, but its execution counts in the step's divisor.
    """

    group: str
    execution: str
    path: Path
    advantage: float
    num_execution_tokens: int
    is_counted_only: bool

    @property
    def num_path_tokens(self) -> int:
        return self.path.num_trained_tokens

    @property
    def cost_tokens(self) -> int:
        """Tokens that go through the model for it alone."""
        return 0 if self.is_counted_only else self.path.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """`cost_tokens` go through the model for `rows`; one by one they would cost the sum."""

    rows: tuple[Row, ...]
    cost_tokens: int

    @property
    def group(self) -> str:
        return self.rows[0].group

    @property
    def num_path_tokens(self) -> int:
        return sum(row.cost_tokens for row in self.rows)


@dataclass(slots=True)
class _Growing:
    """Rows so far and, for each node, how deep they cover it."""

    rows: list[Row] = field(default_factory=list)
    cost_tokens: int = 0
    depth_by_node: dict[int, int] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if row.is_counted_only:
            return
        for piece in row.path.pieces:
            depth = self.depth_by_node.get(piece.node.index, piece.begin)
            if depth < piece.end:
                self.cost_tokens += piece.end - depth
                self.depth_by_node[piece.node.index] = piece.end

    def finish(self) -> Bundle:
        rows = sorted(self.rows, key=lambda row: -row.path.num_tokens)
        return Bundle(rows=tuple(rows), cost_tokens=self.cost_tokens)


def bundles_of(rows: Sequence[Row], *, layout: Layout, budget_tokens: int) -> list[Bundle]:
    """All `rows` of one execution. A tree over the budget is cut between paths: neighbours stay
    together, and what two bundles share is computed in both."""
    if layout is Layout.PATH:
        return [Bundle(rows=(row,), cost_tokens=row.cost_tokens) for row in rows]
    ordered = sorted(rows, key=_place)
    whole = _grown(ordered)
    if whole.cost_tokens <= budget_tokens:
        return [whole.finish()] if ordered else []
    return [_grown(ordered[a:b]).finish() for a, b in pairwise(_cuts(ordered, budget_tokens))]


def _grown(rows: Sequence[Row]) -> _Growing:
    growing = _Growing()
    for row in rows:
        growing.add(row)
    return growing


def _cuts(rows: Sequence[Row], budget_tokens: int) -> list[int]:
    """Where to cut `rows`, from 0 to their number, so that the fewest tokens are computed; of equal
    ones the fewest cuts. Shortest way: `best[k]` is (tokens, bundles) of the first k rows."""
    best = [(0, 0), *[(sys.maxsize, 0)] * len(rows)]
    cut_before = [0] * (len(rows) + 1)
    for first in range(len(rows)):
        growing = _Growing()
        for last in range(first, len(rows)):
            growing.add(rows[last])
            if last > first and growing.cost_tokens > budget_tokens:
                break
            reached = (best[first][0] + growing.cost_tokens, best[first][1] + 1)
            if reached < best[last + 1]:
                best[last + 1], cut_before[last + 1] = reached, first
    cuts = [len(rows)]
    while cuts[-1]:
        cuts.append(cut_before[cuts[-1]])
    return cuts[::-1]


def _place(row: Row) -> tuple[int, ...]:
    """Rows that share nodes are neighbours in this order."""
    return tuple(piece.node.index for piece in row.path.pieces)
