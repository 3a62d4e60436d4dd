"""Packing bundles into one flat micro-step under a token budget, on demand.

Must not know who runs it. Invariants: the largest bundle that fits comes first, so that micro-steps
taken one after another are those of first-fit decreasing; a bundle is never split; a token sees
its own line only: its segment so far, and the segment's ancestors.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from opengyre.trajectory.bundles import Bundle, Row
from opengyre.trajectory.selection import Range
from opengyre.trajectory.tree import Ids, Logprobs, Piece


@dataclass(slots=True, kw_only=True)
class Filling:
    """Bundles chosen so far for one micro-step. One over the budget goes alone."""

    budget_tokens: int
    bundles: list[Bundle] = field(default_factory=list)
    num_tokens: int = 0

    def has_room_for(self, bundle: Bundle) -> bool:
        return self.num_tokens == 0 or self.num_tokens + bundle.cost_tokens <= self.budget_tokens

    def take_from(self, waiting: list[Bundle]) -> None:
        """Move what fits out of `waiting`, which is kept sorted by falling cost."""
        left: list[Bundle] = []
        for bundle in waiting:
            if self.has_room_for(bundle):
                self.bundles.append(bundle)
                self.num_tokens += bundle.cost_tokens
            else:
                left.append(bundle)
        waiting[:] = left

    def take_first(self, waiting: list[Bundle]) -> None:
        """Move the beginning of `waiting` that fits, and leave smaller ones behind it alone."""
        num_taken = 0
        while num_taken < len(waiting) and self.has_room_for(waiting[num_taken]):
            self.bundles.append(waiting[num_taken])
            self.num_tokens += waiting[num_taken].cost_tokens
            num_taken += 1
        del waiting[:num_taken]


def sort_for_packing(waiting: list[Bundle]) -> None:
    """Falling cost; equal ones keep their order."""
    waiting.sort(key=lambda bundle: -bundle.cost_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSegment:
    """Flat tokens [start, end) in a row; each also sees the flat ranges `ancestors`, in order."""

    start: int
    end: int
    ancestors: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPath:
    """A row's line as flat ranges: `pieces`, joined, are all of it, `trained` what it trains."""

    row: Row
    pieces: tuple[Range, ...]
    trained: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Flat arrays of length T; `logprobs` are 0 where nothing was sampled."""

    token_ids: Ids
    position_ids: Ids
    logprobs: Logprobs
    segments: tuple[PackedSegment, ...]
    paths: tuple[PackedPath, ...]


def pack(bundles: Sequence[Bundle]) -> PackedRows:
    """Lay out `bundles`: each path is one segment, which holds what no path before it holds."""
    packer = _Packer()
    for bundle in bundles:
        packer.begin_bundle()
        for row in bundle.rows:
            packer.add(row)
    return packer.finish()


class _Packer:
    def __init__(self) -> None:
        self._ids: list[Ids] = [np.empty(0, np.int32)]
        self._positions: list[Ids] = [np.empty(0, np.int32)]
        self._logprobs: list[Logprobs] = [np.empty(0, np.float32)]
        self._num_tokens = 0
        self._segments: list[PackedSegment] = []
        self._paths: list[PackedPath] = []
        self._laid: dict[int, list[tuple[int, int, int]]] = {}

    def begin_bundle(self) -> None:
        """Nothing is shared across bundles: what is laid down is forgotten."""
        self._laid = {}

    def add(self, row: Row) -> None:
        if row.is_counted_only:
            self._paths.append(PackedPath(row=row, pieces=(), trained=()))
            return
        placed: list[tuple[Range, int]] = []
        start = self._num_tokens
        for piece in row.path.pieces:
            placed += self._place(piece)
        shared = [at for at in placed if at[1] < start]
        self._segments.append(
            PackedSegment(start=start, end=self._num_tokens, ancestors=_flat(shared))
        )
        pieces = _flat(placed)
        trained = tuple(_flat_of(row.path.trained, pieces))
        self._paths.append(PackedPath(row=row, pieces=pieces, trained=trained))

    def finish(self) -> PackedRows:
        return PackedRows(
            token_ids=np.concatenate(self._ids),
            position_ids=np.concatenate(self._positions),
            logprobs=np.concatenate(self._logprobs),
            segments=tuple(self._segments),
            paths=tuple(self._paths),
        )

    def _place(self, piece: Piece) -> list[tuple[Range, int]]:
        """(depths, flat start) of a piece's parts; what is not laid down yet, is."""
        laid = self._laid.setdefault(piece.node.index, [])
        placed = [
            ((begin, min(end, piece.end)), flat) for begin, end, flat in laid if begin < piece.end
        ]
        depth = laid[-1][1] if laid else piece.begin
        if depth < piece.end:
            laid.append((depth, piece.end, self._num_tokens))
            placed.append(((depth, piece.end), self._num_tokens))
            self._lay(piece, depth)
        return placed

    def _lay(self, piece: Piece, depth: int) -> None:
        node = piece.node
        here = slice(depth - node.begin, piece.end - node.begin)
        logprobs = np.zeros(len(node.ids), np.float32)
        logprobs[node.num_injected :] = node.logprobs
        self._ids.append(node.ids[here])
        self._positions.append(np.arange(depth, piece.end, dtype=np.int32))
        self._logprobs.append(logprobs[here])
        self._num_tokens += piece.end - depth


def _flat(placed: Sequence[tuple[Range, int]]) -> tuple[Range, ...]:
    """Flat ranges in order, neighbours joined."""
    joined: list[Range] = []
    for (begin, end), flat in placed:
        if joined and joined[-1][1] == flat:
            joined[-1] = (joined[-1][0], flat + end - begin)
        else:
            joined.append((flat, flat + end - begin))
    return tuple(joined)


def _flat_of(depths: Sequence[Range], pieces: Sequence[Range]) -> Iterator[Range]:
    """Ranges of a line's depths, in order, as flat ranges; `pieces` are the line."""
    sizes = [end - start for start, end in pieces]
    begins = [0, *accumulate(sizes)]
    for begin, end in depths:
        at = bisect_right(begins, begin) - 1
        while begins[at] < end:
            flat = pieces[at][0] - begins[at]
            yield flat + max(begin, begins[at]), flat + min(end, begins[at + 1])
            at += 1
