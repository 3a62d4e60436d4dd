"""Cells in virtual time that claim from a real stream: when each of them ends.

Owns: a clock. Must not know how micro-steps are made. Invariant: a cell claims as soon as it has
room for one more claim, of several at once the one with the lowest number first.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from opengyre.seams.cells import MicroStep
from opengyre.trainer.stream import StepStream


@dataclass(slots=True)
class Cell:
    """Runs what it holds one after another; `sizes` of all that it ran, in tokens."""

    number: int
    tokens_per_s: float
    held: deque[MicroStep] = field(default_factory=deque)
    sizes: list[int] = field(default_factory=list)
    ended_s: float = 0.0


def run_dry(stream: StepStream, speeds: Sequence[float], *, claims_per_cell: int = 1) -> list[Cell]:
    """All members' cells until nothing is left to claim and all is done."""
    cells = [Cell(number, speed) for number, speed in enumerate(speeds)]
    ends: list[tuple[float, int]] = []
    now_s = 0.0
    while True:
        for cell in sorted(cells, key=lambda one: len(one.held)):
            _claim(stream, cell, now_s, claims_per_cell, ends)
        if not ends:
            return cells
        now_s, number = heapq.heappop(ends)
        cell = cells[number]
        made = cell.held.popleft()
        assert stream.done(number, made.number, now_s)
        cell.sizes.append(len(made.token_ids))
        cell.ended_s = now_s
        if cell.held:
            heapq.heappush(ends, (now_s + _seconds(cell), number))


def _claim(
    stream: StepStream,
    cell: Cell,
    now_s: float,
    claims_per_cell: int,
    ends: list[tuple[float, int]],
) -> None:
    while len(cell.held) < claims_per_cell:
        made = stream.claim(cell.number, now_s).micro_step
        if made is None:
            return
        cell.held.append(made)
        if len(cell.held) == 1:
            heapq.heappush(ends, (now_s + _seconds(cell), cell.number))


def _seconds(cell: Cell) -> float:
    return len(cell.held[0].token_ids) / cell.tokens_per_s
