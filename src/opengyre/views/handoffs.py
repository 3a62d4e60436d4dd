"""What became of the prefixes that engines kept for each other: counts, words, table rows.

Must not know: how they travel. Invariant: a reference counts once, by the engine that kept it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opengyre.seams.kv import HandoffStage, KVRelease
from opengyre.store.observations import Handoff
from opengyre.views.run_state import RunState

NOT_ACKNOWLEDGED = "not acknowledged while its lease lasted"
NO_REASON = "no reason was given"
_MIB = 2**20


@dataclass(slots=True, kw_only=True)
class HandoffCounts:
    """Of references: `num_handed_over` were read and taken over by a turn, `num_recomputed` were
    offered to one that computes instead, for `reasons`; `num_idle` were cached where the next turn
    will be. The others served nobody: the turn ended, or moved on before its first token.
    `num_leases_ended` of all ended by themselves. `num_tokens` were cached by their readers, for
    which `num_bytes` were read, none where they were there already."""

    num_handed_over: int = 0
    num_recomputed: int = 0
    num_idle: int = 0
    num_others: int = 0
    num_leases_ended: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_bytes: int = 0
    read_s: float = 0.0

    def add(self, told: Sequence[Handoff]) -> None:
        """All rows of one reference."""
        stages = {one.stage for one in told}
        read = [one for one in told if one.stage is HandoffStage.ACKNOWLEDGED and one.num_tokens]
        if HandoffStage.OFFERED not in stages:
            self.num_others += 1
        elif not told[0].turn:
            self.num_idle += bool(read)
            self.num_others += not read
        elif read and HandoffStage.TAKEN_OVER in stages:
            self.num_handed_over += 1
        elif why := _why_recomputed(told):
            self.num_recomputed += 1
            self.reasons[why] += 1
        else:
            self.num_others += 1
        self.num_leases_ended += any(_is_lease_end(one) for one in told)
        self.num_tokens += sum(one.num_tokens for one in read)
        self.num_bytes += sum(one.num_bytes for one in read)
        self.read_s += sum(one.read_s for one in read)


def _why_recomputed(told: Sequence[Handoff]) -> str:
    """What the reader said last, or that it said nothing while the lease lasted; else "" ."""
    answers = [one for one in told if one.stage is HandoffStage.ACKNOWLEDGED]
    if answers:
        return "" if answers[-1].num_tokens else answers[-1].reason or NO_REASON
    return NOT_ACKNOWLEDGED if any(_is_lease_end(one) for one in told) else ""


def _is_lease_end(told: Handoff) -> bool:
    return told.stage is HandoffStage.RELEASED and told.reason == KVRelease.LEASE_ENDED


def counts_of(handoffs: Iterable[Sequence[Handoff]]) -> HandoffCounts:
    counts = HandoffCounts()
    for told in handoffs:
        counts.add(told)
    return counts


def handoff_words(state: RunState) -> list[str]:
    """None where nothing was kept; else what became of it, and why prefixes were recomputed."""
    if not state.handoffs:
        return []
    counts = counts_of(state.handoffs.values())
    told = f"{counts.num_handed_over} handed over, {counts.num_recomputed} recomputed"
    idle = f"{counts.num_idle} idle, {counts.num_others} not wanted"
    read = f"{counts.num_tokens} tokens cached, {counts.num_bytes} bytes read"
    why = [f"{number} recomputed: {reason}" for reason, number in counts.reasons.most_common()]
    return [f"{told}, {idle}; {read}", *why]


def handoff_cells(state: RunState) -> list[dict[str, Any]]:
    """One line for each engine that kept prefixes for others."""
    by_engine: dict[str, list[Sequence[Handoff]]] = {}
    for told in state.handoffs.values():
        by_engine.setdefault(told[0].from_engine, []).append(told)
    return [_row(engine, counts_of(by_engine[engine])) for engine in sorted(by_engine)]


def _row(engine: str, counts: HandoffCounts) -> dict[str, Any]:
    return {
        "kept by": engine,
        "handed over": counts.num_handed_over,
        "recomputed": counts.num_recomputed,
        "idle": counts.num_idle,
        "not wanted": counts.num_others,
        "leases ended": counts.num_leases_ended,
        "tokens cached": counts.num_tokens,
        "MiB read": round(counts.num_bytes / _MIB, 2),
        "read s": round(counts.read_s, 3),
        "recomputed because": counts.reasons.most_common(1)[0][0] if counts.reasons else "",
    }
