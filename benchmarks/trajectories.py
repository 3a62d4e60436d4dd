"""What a branching history costs: insertion, cutting, packing, and the training of its paths.

Run: `python benchmarks/trajectories.py [--only NAME]`. One torch thread, processor time, medians;
what is compared is measured in turns in the same run. The shapes are drawn, not recorded; their
parameters are those of `trajectory_bench.executions.Shape` unless `cases.SHAPES` says otherwise.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from trajectory_bench.cases import (
    BUDGET_TOKENS,
    SHAPES,
    Case,
    best_cut,
    case_of,
    cost_of,
    micro_steps_of,
    next_fit,
    num_pairs,
    rows_of,
    tree_of,
    trees,
    trees_of_tokens,
)
from trajectory_bench.executions import VOCABULARY, Author, Shape
from trajectory_bench.training import no_attention, run_s, small_model, training_cell

from opengyre.seams.cells import MicroStep
from opengyre.trainer.embedded import EmbeddedCell
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.trajectory.bundles import Bundle, Layout, Row, bundles_of
from opengyre.trajectory.tree import Tree

CAPS = (1, 5, 0)
NUM_TOKENS = 20_000
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=PARTS, default=None)
    only = parser.parse_args().only
    for name, part in PARTS.items():
        if only in (None, name):
            for line in part():
                print(line, flush=True)
            print()


def header(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def inserting() -> Iterator[str]:
    """One execution of a million tokens at its real size; sub-agents, compactions and all."""
    turns = list(Author(Shape(scale=1, num_turns=(600, 1e-9)), seed=0).turns())
    yield from header("turns", "tokens", "s", "M tokens / s", "bytes / token")
    for share in (8, 4, 2, 1):
        part = turns[: len(turns) // share]
        taken_s = statistics.median(timed(partial(tree_of, part)) for _ in range(7))
        tracemalloc.start()
        tree = tree_of(part)
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        num = tree.num_tokens
        rates = f"{taken_s:.3f} | {num / taken_s / 1e6:.1f} | {num_bytes / num:.1f}"
        yield f"| {len(part)} | {num:,} | {rates} |"


def timed(work: Callable[[], object]) -> float:
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def training() -> Iterator[str]:
    """Shares are of the uncapped time path by path; the bound of the gain is the ratio."""
    yield from header(
        *("shape", "J_max", "paths", "tokens by path", "as tree", "ratio", "by path s", "share"),
        *("as tree s", "share", "gain", "gain / ratio"),
    )
    apart: list[str] = []
    with training_cell(small_model(VOCABULARY)) as cell:
        for shape in SHAPES:
            grown = trees_of_tokens(SHAPES[shape], NUM_TOKENS)
            cases = [case_of(shape, grown, cap, layout) for cap in CAPS for layout in Layout]
            times, rest = medians_s(cell, cases, num_apart=len(Layout))
            for number in range(0, len(cases), 2):
                pair = slice(number, number + 2)
                yield _training_row(cases[pair], times[pair], whole_s=times[-2])
            apart.append(_parts_row(cases[-2:], times[-2:], rest))
    yield ""
    yield from header(
        *("shape", "ratio", "the rest by path s", "as tree s", "gain"),
        *("attention by path s", "as tree s", "gain", "ratio of pairs"),
    )
    yield from apart


def _training_row(pair: Sequence[Case], times: Sequence[float], *, whole_s: float) -> str:
    (path, tree), (path_s, tree_s) = pair, times
    ratio, gain = path.num_tokens / tree.num_tokens, path_s / tree_s
    return (
        f"| {path.shape} | {path.max_paths or 'all'} | {path.num_paths:.1f} "
        f"| {path.num_tokens:,} | {tree.num_tokens:,} | {ratio:.2f} "
        f"| {path_s:.2f} | {path_s / whole_s:.1%} | {tree_s:.2f} | {tree_s / whole_s:.1%} "
        f"| {gain:.2f} | {gain / ratio:.2f} |"
    )


def _parts_row(pair: Sequence[Case], times: Sequence[float], rest: Sequence[float]) -> str:
    """Attention is what is left of the whole without the rest."""
    path, tree = pair
    own = [whole_s - rest_s for whole_s, rest_s in zip(times, rest, strict=True)]
    return (
        f"| {path.shape} | {path.num_tokens / tree.num_tokens:.2f} "
        f"| {rest[0]:.2f} | {rest[1]:.2f} | {rest[0] / rest[1]:.2f} "
        f"| {own[0]:.2f} | {own[1]:.2f} | {own[0] / own[1]:.2f} "
        f"| {num_pairs(path) / num_pairs(tree):.2f} |"
    )


def medians_s(
    cell: EmbeddedCell, cases: Sequence[Case], *, num_apart: int
) -> tuple[list[float], list[float]]:
    """Of all cases, and of the last ones without attention. In turns, so that what else the
    machine does falls on all of them."""
    times: list[list[float]] = [[] for _ in range(len(cases) + num_apart)]
    for _ in range(ROUNDS):
        for number, case in enumerate(cases):
            times[number].append(run_s(cell, case.micro_steps))
        with no_attention():
            for number, case in enumerate(cases[-num_apart:], start=len(cases)):
                times[number].append(run_s(cell, case.micro_steps))
    medians = [statistics.median(taken) for taken in times]
    return medians[: len(cases)], medians[len(cases) :]


def cutting() -> Iterator[str]:
    """Trees of all paths under a budget: tokens computed, against the uncut tree."""
    yield from header("shape", "budget", "trees cut", "next fit", "ours", "best of all")
    for shape in ("long", "delegating", "rewriting"):
        rows = [rows_of(tree, 0, 6) for tree in trees(SHAPES[shape], 24)]
        for budget in (2048, 3072, 4096):
            yield _cutting_row(shape, rows, budget)


def _cutting_row(shape: str, executions: Sequence[Sequence[Row]], budget: int) -> str:
    costs = []
    for rows in executions:
        uncut = cost_of(rows)
        if uncut > budget and len(rows) > 1:
            ours = bundles_of(rows, layout=Layout.TREE, budget_tokens=budget)
            fit, best = next_fit(rows, budget), best_cut(rows, budget)
            costs.append((uncut, fit, sum(one.cost_tokens for one in ours), best))
    uncut, *told = np.sum(costs, axis=0).tolist() if costs else (1, 1, 1, 1)
    return (
        f"| {shape} | {budget} | {len(costs)} | "
        + " | ".join(f"+{one / uncut - 1:.1%}" for one in told)
        + " |"
    )


def filling() -> Iterator[str]:
    """Fill of micro-steps: all bundles sorted at once, and group by group as the stream claims."""
    yield from header("shape", "layout", "sorted at once", "group by group", "micro-steps")
    for shape in SHAPES:
        grown = trees(SHAPES[shape], 64)
        for layout in Layout:
            yield _filling_row(shape, grown, layout)


def _filling_row(shape: str, grown: Sequence[Tree], layout: Layout) -> str:
    groups: dict[str, list[Bundle]] = {}
    for number, tree in enumerate(grown):
        rows = rows_of(tree, number, 5)
        groups.setdefault(rows[0].group, []).extend(
            bundles_of(rows, layout=layout, budget_tokens=BUDGET_TOKENS)
        )
    at_once = micro_steps_of([one for group in groups.values() for one in group], BUDGET_TOKENS)
    settings = StreamSettings(budget_tokens=BUDGET_TOKENS, lease_s=60, max_groups=len(groups))
    stream = StepStream(0, version=0, bundles_of=groups.__getitem__, settings=settings)
    stream.admit(0)
    stream.offer(list(groups))
    claimed: list[MicroStep] = []
    while (made := stream.claim(0, 0.0).micro_step) is not None:
        claimed.append(made)
    fills = [
        sum(len(one.token_ids) for one in steps) / (BUDGET_TOKENS * len(steps))
        for steps in (at_once, claimed)
    ]
    return f"| {shape} | {layout} | {fills[0]:.1%} | {fills[1]:.1%} | {len(claimed)} |"


PARTS = {
    "inserting": inserting,
    "training": training,
    "cutting": cutting,
    "filling": filling,
}

if __name__ == "__main__":
    main()
