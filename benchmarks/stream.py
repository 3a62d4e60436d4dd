"""The stream of a step: speed-up by cells, how far apart they end, what looking ahead spares.

Run: `python benchmarks/stream.py [--only NAME]`. Micro-steps sleep, or take virtual time; what is
compared is measured in the same run. Claims travel as in a run: packed, framed, over a socket.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from stream_bench.cells import run_dry
from stream_bench.groups import (
    Groups,
    groups_of,
    long_tailed_sizes,
    recorded_groups,
)
from stream_bench.sleepers import Desk, run_sleepers

from opengyre.runtime.trained_groups import TrainedGroups
from opengyre.trainer.stream import StepStream, StreamSettings

SLEEPING_TOKENS = 8192
VIRTUAL_TOKENS = 512
SEEDS = range(12)
TICK_S = 0.001
NUM_GROUPS, NUM_MEMBERS = 16, 8


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


def stream_of(
    groups: Groups, *, budget_tokens: int, num_cells: int, lookahead_groups: int, num_stages: int
) -> StepStream:
    """A step of all `groups`, offered, with its members."""
    settings = StreamSettings(
        budget_tokens=budget_tokens,
        lease_s=60.0,
        max_groups=len(groups),
        lookahead_groups=lookahead_groups,
        parts_per_cell=num_stages + 1,
    )
    stream = StepStream(0, version=0, bundles_of=groups.__getitem__, settings=settings)
    for cell in range(num_cells):
        stream.admit(cell)
    stream.offer(list(groups))
    return stream


def cells() -> Iterator[str]:
    """Step time against the number of cells: 64 equal micro-steps that sleep for 0.1 s."""
    yield from header("claims", "cells K", "step s", "speed-up", "/ K", "until dry / K")
    groups = groups_of([[SLEEPING_TOKENS] * 8] * 8)
    for is_ahead in (False, True):
        alone_s = 0.0
        for num_cells in range(1, 9):
            stream = stream_of(
                groups,
                budget_tokens=SLEEPING_TOKENS,
                num_cells=num_cells,
                lookahead_groups=2,
                num_stages=1,
            )
            running = run_sleepers(
                stream, num_groups=len(groups), num_cells=num_cells, is_ahead=is_ahead
            )
            desk = asyncio.run(running)
            alone_s = alone_s or desk.step_s
            yield _cells_row(desk, num_cells, alone_s=alone_s, is_ahead=is_ahead)


def _cells_row(desk: Desk, num_cells: int, *, alone_s: float, is_ahead: bool) -> str:
    speed_up = alone_s / desk.step_s
    until_dry = desk.busy_until_dry_s / desk.last_claim_s
    return (
        f"| {'one ahead' if is_ahead else 'when free'} | {num_cells} | {desk.step_s:.2f} | "
        f"{speed_up:.2f} | {speed_up / num_cells:.3f} | {until_dry / num_cells:.3f} |"
    )


def ends() -> Iterator[str]:
    """When the cells of a dry step end, unequal sizes, in virtual time. The bound is the greater of
    mean load and largest bundle."""
    yield from header(
        "claims held", "cells", "looked ahead", "last end / bound", "worst", "apart / mean", "steps"
    )
    for claims_per_cell in (1, 3):
        for num_cells in (2, 4, 8):
            for lookahead_groups in (0, 2, 4, NUM_GROUPS):
                yield _ends_row(claims_per_cell, num_cells, lookahead_groups)


def _ends_row(claims_per_cell: int, num_cells: int, lookahead_groups: int) -> str:
    lates, spreads, counts = [], [], []
    for seed in SEEDS:
        sizes = long_tailed_sizes(
            NUM_GROUPS, num_members=NUM_MEMBERS, median_tokens=VIRTUAL_TOKENS // 2, seed=seed
        )
        stream = stream_of(
            groups_of(sizes),
            budget_tokens=VIRTUAL_TOKENS,
            num_cells=num_cells,
            lookahead_groups=lookahead_groups,
            num_stages=max(1, claims_per_cell - 1),
        )
        done = run_dry(stream, [1.0] * num_cells, claims_per_cell=claims_per_cell)
        mean = sum(map(sum, sizes)) / num_cells
        last = max(cell.ended_s for cell in done)
        lates.append(last / max(mean, *map(max, sizes)))
        spreads.append((last - min(cell.ended_s for cell in done)) / mean)
        counts.append(sum(len(cell.sizes) for cell in done))
    name = {0: "none: in order", NUM_GROUPS: "all"}.get(lookahead_groups, f"{lookahead_groups}")
    return (
        f"| {claims_per_cell} | {num_cells} | {name} | {statistics.fmean(lates):.3f} | "
        f"{max(lates):.3f} | {statistics.fmean(spreads):.3f} | {statistics.fmean(counts):.0f} |"
    )


def preparing() -> Iterator[str]:
    """How long the controller's loop stands still while rows of a group are made."""
    yield from header("group of tokens", "rows are made", "took s", "longest stall ms")
    names = [f"g{number:05d}" for number in range(4)]
    for num_turns in (25, 100):
        with tempfile.TemporaryDirectory() as folder:
            made = recorded_groups(
                Path(folder),
                num_groups=len(names),
                num_members=NUM_MEMBERS,
                num_turns=num_turns,
                turn_tokens=1000,
            )
            num_tokens = num_turns * 1000 * NUM_MEMBERS
            yield from (f"| {num_tokens:,} | {row}" for row in stalls(made, names))


def stalls(made: TrainedGroups, names: list[str]) -> Iterator[str]:
    for words, work in (("at once", _at_once), ("ahead", _ahead), ("not", _idle)):
        for name in names:
            made.forget(name)
        took_s, stall_s = asyncio.run(_watched(work, made, names))
        yield f"{words} | {took_s / len(names):.3f} | {stall_s * 1e3:.1f} |"


Work = Callable[[TrainedGroups, list[str]], Awaitable[None]]


async def _watched(work: Work, made: TrainedGroups, names: list[str]) -> tuple[float, float]:
    """(seconds, how late at most another timer of the loop was) of `work`."""
    stall_s, started_s = 0.0, time.perf_counter()
    running = asyncio.ensure_future(work(made, names))
    while not running.done():
        due_s = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        stall_s = max(stall_s, time.perf_counter() - due_s)
    await running
    return time.perf_counter() - started_s, stall_s


async def _at_once(made: TrainedGroups, names: list[str]) -> None:
    for name in names:
        await asyncio.sleep(2 * TICK_S)
        made.group(name)


async def _idle(made: TrainedGroups, names: list[str]) -> None:
    """What the machine itself makes late."""
    await asyncio.sleep(1.0)


async def _ahead(made: TrainedGroups, names: list[str]) -> None:
    woken = asyncio.Event()
    task = asyncio.create_task(made.prepare(woken.set))
    for number, name in enumerate(names):
        made.look_ahead(names[number:], names[:number])
        while made.prepared(name) is None:
            woken.clear()
            await woken.wait()
    task.cancel()
    await asyncio.wait([task])


PARTS = {"cells": cells, "ends": ends, "preparing": preparing}

if __name__ == "__main__":
    main()
