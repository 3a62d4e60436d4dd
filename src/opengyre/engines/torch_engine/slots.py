"""Which request has which KV slot, which tokens each slot holds, and who can reuse them.

Pure bookkeeping in numpy (one row for each slot); the tensors are the KV pool's. Must not know:
torch, asyncio. Invariants: `num_cached[s]` leading tokens of `ids[s]` have valid KV in slot s, of
the version loaded now; a slot has at most one owner, a request or a pin; a freed slot keeps its
tokens as cache until another request takes it; nobody writes a pinned slot.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from opengyre.control.errors import InvariantError
from opengyre.engines.desk import Live

MIN_REUSED_TOKENS = 4
MIN_SHARED_TOKENS = 16
_MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`num_reused` leading tokens come from slot `source` (which may be `slot` itself)."""

    slot: int
    source: int
    num_reused: int


class SlotTable:
    """Arrays over slots; read by the batch planner, written between and inside steps by one
    thread at a time."""

    def __init__(self, num_slots: int, context_tokens: int) -> None:
        self.ids = np.zeros((num_slots, context_tokens + 1), np.int64)
        self.num_ids = np.zeros(num_slots, np.int64)
        self.num_cached = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.uint64)
        self.temperature = np.ones(num_slots, np.float64)
        self.top_p = np.ones(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.num_reused_tokens = 0
        self._slots: dict[Live, int] = {}
        self._is_owned = np.zeros(num_slots, bool)
        self._executions = [""] * num_slots
        self._last_used = np.zeros(num_slots, np.int64)
        self._clock = 0

    @property
    def num_free(self) -> int:
        return int((~self._is_owned).sum())

    def slot_of(self, live: Live) -> int | None:
        return self._slots.get(live)

    def num_reusable(self, live: Live) -> int:
        """Leading tokens of `live` that are cached in some slot."""
        return int(self._common_prefixes(np.asarray(live.ids, np.int64), self.num_cached).max())

    def is_being_computed(self, live: Live) -> bool:
        """A request that has a slot is about to compute a prefix of `live` that is cached nowhere:
        waiting for it costs less than computing it twice."""
        ids = np.asarray(live.ids[:-1], np.int64)
        num_coming = self._common_prefixes(ids, np.where(self._is_owned, self.num_ids, 0)).max()
        if num_coming < MIN_SHARED_TOKENS:
            return False
        num_cached = self._common_prefixes(ids, self.num_cached).max()
        return bool(num_coming - num_cached >= MIN_SHARED_TOKENS)

    def assign(self, live: Live) -> Assignment:
        """Give `live` a free slot with as much of its prefix as is cached anywhere. The caller
        copies the KV when source and slot differ. At least its last token is left to compute."""
        if self._is_owned.all():
            raise InvariantError(f"no KV slot is free for {live.request.request_id}")
        ids = np.asarray(live.ids, np.int64)
        common = self._common_prefixes(ids[:-1], self.num_cached)
        source = int(common.argmax())
        num_reused = int(common[source])
        if num_reused < MIN_REUSED_TOKENS:
            num_reused = 0
        slot = source if self._is_taken_over(source, num_reused) else self._least_used()
        self._take(live, slot, ids, num_reused)
        return Assignment(slot=slot, source=source, num_reused=num_reused)

    def reserve(self, live: Live) -> int | None:
        """A free slot whose KV is about to be read from elsewhere; None if there is none."""
        if self._is_owned.all():
            return None
        slot = self._least_used()
        self._take(live, slot, np.asarray(live.ids, np.int64), num_reused=0)
        return slot

    def arrived(self, live: Live, num_tokens: int) -> None:
        """The KV of its first `num_tokens` was read into its slot."""
        self.num_cached[self._slots[live]] = num_tokens

    def pin(self, live: Live) -> tuple[int, int] | None:
        """The slot of a live that leaves is a pin's from now on; returns it and how many tokens are
        cached. None, and nothing changed, if too few are."""
        slot = self._slots.get(live)
        if slot is None or self.num_cached[slot] < MIN_REUSED_TOKENS:
            return None
        del self._slots[live]
        self.num_ids[slot] = self.num_cached[slot]
        return slot, int(self.num_cached[slot])

    def pin_idle(self, executions: Collection[str]) -> list[tuple[str, int, list[int]]]:
        """Pins free slots with what these executions left in them: execution, slot, ids of each.
        What another of them begins with is left out."""
        idle = np.flatnonzero(~self._is_owned & (self.num_cached >= MIN_REUSED_TOKENS))
        by_length = sorted(idle.tolist(), key=lambda slot: -int(self.num_cached[slot]))
        found: list[tuple[str, int, list[int]]] = []
        for slot in by_length:
            execution = self._executions[slot]
            ids = self.ids[slot, : self.num_cached[slot]].tolist()
            if execution not in executions or any(ids == one[2][: len(ids)] for one in found):
                continue
            self._is_owned[slot] = True
            found.append((execution, slot, ids))
        return found

    def unpin(self, slot: int) -> None:
        """What it holds is cache again."""
        self._is_owned[slot] = False

    def executions(self) -> set[str]:
        """That left something in a slot."""
        return set(self._executions) - {""}

    def free(self, live: Live) -> None:
        """The slot keeps what is computed as cache."""
        slot = self._slots.pop(live, None)
        if slot is not None:
            self._is_owned[slot] = False
            self.num_ids[slot] = self.num_cached[slot]

    def spoil(self, live: Live) -> int:
        """What this slot holds must not be reused (its numbers are not finite)."""
        slot = self._slots[live]
        self.num_cached[slot] = 0
        return slot

    def clear(self) -> None:
        """Empty every cache. Only while no request has a slot."""
        if self._slots:
            raise InvariantError("caches emptied under running requests")
        self.num_ids[:] = 0
        self.num_cached[:] = 0
        self._executions = [""] * len(self._executions)

    def append(self, slots: np.ndarray, ids: np.ndarray) -> None:
        self.ids[slots, self.num_ids[slots]] = ids
        self.num_ids[slots] += 1

    def _take(self, live: Live, slot: int, ids: np.ndarray, num_reused: int) -> None:
        request = live.request
        self._clock += 1
        self._last_used[slot] = self._clock
        self._is_owned[slot] = True
        self._slots[live] = slot
        self.ids[slot, : len(ids)] = ids
        self.num_ids[slot] = len(ids)
        self.num_cached[slot] = num_reused
        self.num_reused_tokens += num_reused
        self.seeds[slot] = request.seed & _MASK_64
        self.temperature[slot] = request.temperature
        self.top_p[slot] = request.top_p
        self.top_k[slot] = request.top_k
        self.min_p[slot] = request.min_p
        self._executions[slot] = request.execution

    def _common_prefixes(self, ids: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Of `ids` with the first `limits` tokens of each slot, in tokens."""
        if len(ids) == 0:
            return np.zeros(len(self.num_cached), np.int64)
        columns = np.arange(len(ids))
        differs = (self.ids[:, : len(ids)] != ids) | (columns >= limits[:, None])
        first = differs.argmax(1)
        return np.where(differs.any(1), first, len(ids))

    def _is_taken_over(self, slot: int, num_reused: int) -> bool:
        """A free slot is continued in place unless that would throw away most of its cache."""
        is_mostly_kept = 2 * num_reused >= self.num_cached[slot]
        return bool(not self._is_owned[slot] and num_reused > 0 and is_mostly_kept)

    def _least_used(self) -> int:
        """The free slot whose loss costs least: an empty one, else the one used longest ago."""
        order = np.where(self.num_cached > 0, self._last_used, -1)
        return int(np.where(self._is_owned, np.iinfo(np.int64).max, order).argmin())
