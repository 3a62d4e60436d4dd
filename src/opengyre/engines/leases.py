"""The pins of one engine: which prefixes are kept for a reader, and until when.

Owns: leases and their ends. Must not know: slots, bytes. Invariants: each pin ends exactly once:
released, at its lease's end, or dropped; `on_end` is called for it then, before anyone is told.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable

from opengyre.seams.kv import KVRelease

MAX_REMEMBERED = 4096


class Leases:
    """Used on one event loop. `name` makes references unique over engines and lives ("": drawn)."""

    def __init__(self, *, name: str, lease_s: float) -> None:
        self.lease_s = lease_s
        self._name = name or secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._ends: dict[str, Callable[[], None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ended: dict[str, KVRelease] = {}
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._ends)

    def new_ref(self) -> str:
        return f"{self._name}.kv{next(self._numbers)}"

    def add(self, ref: str, on_end: Callable[[], None]) -> None:
        """The lease begins now."""
        loop = asyncio.get_running_loop()
        self._ends[ref] = on_end
        self._timers[ref] = loop.call_later(self.lease_s, self._end, ref, KVRelease.LEASE_ENDED)
        self._none_left.clear()

    def release(self, ref: str) -> KVRelease:
        """RELEASED; for a pin that ended before, how; UNKNOWN the next time and for no pin."""
        if ref in self._ends:
            self._end(ref, KVRelease.RELEASED)
        return self._ended.pop(ref, KVRelease.UNKNOWN)

    def drop_all(self) -> None:
        for ref in list(self._ends):
            self._end(ref, KVRelease.DROPPED)

    def drop_oldest(self) -> bool:
        """False if there is none."""
        for ref in self._ends:
            self._end(ref, KVRelease.DROPPED)
            return True
        return False

    async def wait_none(self) -> None:
        """At most the longest lease that is left."""
        await self._none_left.wait()

    def _end(self, ref: str, how: KVRelease) -> None:
        on_end = self._ends.pop(ref)
        self._timers.pop(ref).cancel()
        on_end()
        self._ended[ref] = how
        while len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if not self._ends:
            self._none_left.set()
