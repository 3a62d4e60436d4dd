"""Packing rows into one flat micro-step under a token budget, in order and on demand.

Must not know who runs it. Invariants: rows are never reordered or split; positions start at 0
in every segment; a counted-only row is an empty segment that carries its share T_j / T_e.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from opengyre.trajectory.groups import Row


@dataclass(slots=True, kw_only=True)
class Filling:
    """Rows chosen so far for one micro-step. A row longer than the budget goes alone."""

    budget_tokens: int
    rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0

    def has_room_for(self, row: Row) -> bool:
        return self.num_tokens == 0 or self.num_tokens + row.cost_tokens <= self.budget_tokens

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.num_tokens += row.cost_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSegment:
    row: Row
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Flat arrays of length T over all segments, in row order."""

    token_ids: list[int]
    position_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    segments: list[PackedSegment]


def pack(rows: Sequence[Row]) -> PackedRows:
    """Concatenate `rows`; each is one segment [start, end)."""
    packed = PackedRows(
        token_ids=[], position_ids=[], mask=[], logprobs=[], versions=[], segments=[]
    )
    for row in rows:
        start = len(packed.token_ids)
        if not row.is_counted_only:
            packed.token_ids.extend(row.path.token_ids)
            packed.position_ids.extend(range(len(row.path.token_ids)))
            packed.mask.extend(row.path.mask)
            packed.logprobs.extend(row.path.logprobs)
            packed.versions.extend(row.path.versions)
        packed.segments.append(PackedSegment(row=row, start=start, end=len(packed.token_ids)))
    return packed
