"""Paths, rows and bundles for tests of training, made of real trees."""

from collections.abc import Sequence

import numpy as np

from opengyre.seams.cells import MicroStep
from opengyre.trainer.wire import micro_step
from opengyre.trajectory.bundles import Bundle, Layout, Row, bundles_of
from opengyre.trajectory.selection import Path, SelectionSettings, select
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import ForkReason, Role, SampledSpan, TurnTokens


def tree_of_line(
    token_ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float] | None = None
) -> Tree:
    """Turns one after another: a token is sampled where `mask` is 1; the last one must be."""
    told = [-0.5] * len(token_ids) if logprobs is None else logprobs
    ends = [i + 1 for i in range(len(mask)) if mask[i] and not (*mask, 0)[i + 1]]
    tree, begin = Tree(), 0
    for number, end in enumerate(ends, start=1):
        middle = begin + list(mask[begin:end]).index(1)
        tree.insert(
            TurnTokens(
                turn=f"e1.t{number}",
                attempt=0,
                parent=f"e1.t{number - 1}" if number > 1 else "",
                fork_reason=ForkReason.NONE,
                role=Role.MAIN,
                is_committed=True,
                num_kept_tokens=begin,
                new_prompt_ids=token_ids[begin:middle],
                completion_ids=token_ids[middle:end],
                logprobs=told[middle:end],
                spans=(SampledSpan(start=0, end=end - middle, version=0, engine="c0#1"),),
            )
        )
        begin = end
    return tree


def all_paths(tree: Tree) -> tuple[Path, ...]:
    settings = SelectionSettings(max_paths=0)
    return select(tree, settings=settings, rng=np.random.default_rng(0)).paths


def line_row(
    execution: str,
    num_tokens: int,
    *,
    group: str = "g",
    advantage: float = 1.0,
    is_counted_only: bool = False,
) -> Row:
    """One path of `num_tokens` ids from 0 on, all sampled but the first."""
    (path,) = all_paths(tree_of_line(range(num_tokens), [0] + [1] * (num_tokens - 1)))
    return Row(
        group=group,
        execution=execution,
        path=path,
        advantage=advantage,
        num_execution_tokens=num_tokens - 1,
        is_counted_only=is_counted_only,
    )


def alone(*rows: Row) -> list[Bundle]:
    """Each row in a bundle of its own."""
    return bundles_of(rows, layout=Layout.PATH, budget_tokens=1)


def micro_step_of(*rows: Row, number: int = 0, step: int = 0, version: int = 0) -> MicroStep:
    return micro_step(alone(*rows), step=step, number=number, version=version)


def line_logprobs(path: Path) -> list[float]:
    """Sampling logprobs along the whole line, 0 where nothing was sampled."""
    return [
        value
        for piece in path.pieces
        for value in [*[0.0] * piece.node.num_injected, *piece.node.logprobs.tolist()][
            : piece.end - piece.begin
        ]
    ]


def trained_depths(path: Path) -> list[int]:
    return [depth for begin, end in path.trained for depth in range(begin, end)]
