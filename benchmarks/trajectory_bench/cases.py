"""From shapes to trees, bundles and micro-steps, and the cuts that ours is compared with.

Must not know: models, times.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from trajectory_bench.executions import Author, Shape

from opengyre.seams.cells import MicroStep
from opengyre.trainer.wire import micro_step
from opengyre.trajectory.bundles import Bundle, Layout, Row, bundles_of
from opengyre.trajectory.packing import Filling, sort_for_packing
from opengyre.trajectory.selection import SelectionSettings, select
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import TurnTokens

BUDGET_TOKENS = 8192
NO_BOUND = sys.maxsize
SHAPES = {
    "long": Shape(),
    "delegating": Shape(
        num_turns=(40, 0.6),
        compaction_tokens=NO_BOUND,
        max_sub_agents=12,
        sub_turns=(8, 0.6),
        p_rewrite=0,
    ),
    "rewriting": Shape(num_turns=(60, 0.6), max_sub_agents=0, p_rewrite=0.05),
    "one path": Shape(
        num_turns=(20, 0.5), compaction_tokens=NO_BOUND, max_sub_agents=0, p_rewrite=0
    ),
}


def tree_of(turns: Sequence[TurnTokens]) -> Tree:
    tree = Tree()
    for turn in turns:
        tree.insert(turn)
    return tree


def trees(shape: Shape, num_executions: int) -> list[Tree]:
    return [tree_of(list(Author(shape, seed=seed).turns())) for seed in range(num_executions)]


def trees_of_tokens(shape: Shape, num_tokens: int) -> list[Tree]:
    """As many executions as it takes to have that many tokens, each token once."""
    grown: list[Tree] = []
    while sum(tree.num_tokens for tree in grown) < num_tokens:
        grown.append(tree_of(list(Author(shape, seed=len(grown)).turns())))
    return grown


def rows_of(tree: Tree, execution: int, max_paths: int) -> list[Row]:
    settings = SelectionSettings(max_paths=max_paths)
    selection = select(tree, settings=settings, rng=np.random.default_rng(execution))
    return [
        Row(
            group=f"g{execution // 8}",
            execution=f"e{execution}",
            path=path,
            advantage=1.0,
            num_execution_tokens=selection.account.trained,
            is_counted_only=False,
        )
        for path in selection.paths
    ]


def micro_steps_of(bundles: Sequence[Bundle], budget_tokens: int) -> list[MicroStep]:
    waiting, made = list(bundles), []
    sort_for_packing(waiting)
    while waiting:
        filling = Filling(budget_tokens=budget_tokens)
        filling.take_from(waiting)
        made.append(micro_step(filling.bundles, step=0, number=len(made), version=0))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Micro-steps of one shape, cap and layout; `num_paths` of an execution, in the mean."""

    shape: str
    max_paths: int
    layout: Layout
    micro_steps: tuple[MicroStep, ...]
    num_paths: float

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.micro_steps)


def case_of(shape: str, grown: Sequence[Tree], max_paths: int, layout: Layout) -> Case:
    rows = [rows_of(tree, number, max_paths) for number, tree in enumerate(grown)]
    bundles = [
        bundle for one in rows for bundle in bundles_of(one, layout=layout, budget_tokens=NO_BOUND)
    ]
    return Case(
        shape=shape,
        max_paths=max_paths,
        layout=layout,
        micro_steps=tuple(micro_steps_of(bundles, BUDGET_TOKENS)),
        num_paths=sum(map(len, rows)) / len(rows),
    )


def num_pairs(case: Case) -> int:
    """(query, key) pairs that attention needs: each token's depth in its line."""
    return sum(sum(one.position_ids) + len(one.position_ids) for one in case.micro_steps)


def cost_of(rows: Sequence[Row]) -> int:
    (whole,) = bundles_of(rows, layout=Layout.TREE, budget_tokens=NO_BOUND)
    return whole.cost_tokens


def next_fit(rows: Sequence[Row], budget: int) -> int:
    """In the order of the tree, each path into the last bundle or a new one."""
    total, bundle = 0, []
    for row in sorted(rows, key=lambda row: [piece.node.index for piece in row.path.pieces]):
        if bundle and cost_of([*bundle, row]) > budget:
            total, bundle = total + cost_of(bundle), []
        bundle.append(row)
    return total + cost_of(bundle)


def best_cut(rows: Sequence[Row], budget: int) -> int:
    """Of all ways to part the rows (203 for six)."""

    def ways(parts: list[list[Row]], left: Sequence[Row]) -> int:
        if not left:
            return sum(cost_of(part) for part in parts)
        first, *rest = left
        found = [ways([*parts, [first]], rest)]
        for number, part in enumerate(parts):
            grown = [*part, first]
            if cost_of(grown) <= budget:
                found.append(ways([*parts[:number], grown, *parts[number + 1 :]], rest))
        return min(found)

    return ways([], rows)
