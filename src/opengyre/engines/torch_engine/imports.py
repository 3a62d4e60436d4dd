"""Prefixes that requests want read from another engine, each on its way into a slot.

Owns: whether to read or to compute (`auto`), readings, copying a part of them in each step, and
what is said of it. Must not know: leases, sampling. Invariants: copying runs in the compute thread
like a forward, so nothing is read while paused; a slot counts as cached only after its last byte
was read and its pin was found standing; whatever fails is computed.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from opengyre.engines.desk import Live
from opengyre.engines.handoff import refusal_of
from opengyre.engines.torch_engine.kv_pool import KVPool
from opengyre.engines.torch_engine.slots import SlotTable
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVTaken
from opengyre.transport.kv import KVReading
from opengyre.transport.kv_open import open_reading

STEP_BYTES = 64 * 2**20
MIN_PREFILL_TOKENS = 32
TRY_AGAIN_AFTER = 8
_WEIGHT_OF_NEW = 0.3


class Speed:
    """A running mean of something per second; None until something was measured."""

    def __init__(self) -> None:
        self.per_s: float | None = None

    def measured(self, amount: float, seconds: float) -> None:
        now = amount / max(seconds, 1e-9)
        before = now if self.per_s is None else self.per_s
        self.per_s = before + _WEIGHT_OF_NEW * (now - before)


@dataclass(slots=True)
class _Import:
    """`reason`: why nothing is read; else `reading` brings it, of which `num_done` ranges are in
    the slot. `was_late`: it did not come before its lease ended."""

    ref: KVRef
    reason: str = ""
    reading: KVReading | None = None
    waiting: asyncio.Task[None] | None = None
    num_done: int = 0
    read_s: float = 0.0
    is_here_already: bool = False
    was_late: bool = False
    is_over: bool = False

    def close(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
        if self.reading is not None:
            self.reading.close()


class Imports:
    """`mode` is off, on or auto; `model` names what this engine's KV is of."""

    def __init__(self, pool: KVPool, table: SlotTable, *, mode: str, model: str) -> None:
        self.num_tokens = 0
        self.prefill = Speed()
        self.transfer = Speed()
        self._pool = pool
        self._table = table
        self._mode = mode
        self._model = model
        self._imports: dict[Live, _Import] = {}
        self._num_computed = 0

    def expect(self, live: Live, version: int, on_ready: Callable[[], None]) -> None:
        """On the event loop: begin to fetch, or note why not."""
        ref = live.request.kv
        assert ref is not None, "expected without a reference"
        one = self._imports[live] = _Import(ref, self._why_not(ref, live, version))
        if not one.reason:
            self._open(one)
        if one.reading is None or one.reading.is_here():
            on_ready()
        else:
            waiting = _wait(one, one.reading, on_ready)
            one.waiting = asyncio.get_running_loop().create_task(waiting)

    def forget(self, live: Live) -> None:
        if (one := self._imports.pop(live, None)) is not None:
            one.close()

    def is_coming(self, live: Live) -> bool:
        """Something is left to say of its prefix."""
        if live.request.kv is None:
            return False
        one = self._imports.get(live)
        return one is None or not one.is_over

    def advance(self, live: Live, version: int, *, max_bytes: int) -> tuple[KVTaken | None, int]:
        """In the compute thread: copy of it what is allowed, at least a range. Returns what became
        of it, None while it goes on, and the bytes copied."""
        ref = live.request.kv
        assert ref is not None, "advanced without a reference"
        one = self._imports.setdefault(live, _Import(ref, "new weights came between"))
        reading = self._reading_for(one, live, version)
        if reading is None:
            return self._over(one, version), 0
        started_s = time.perf_counter()
        slot = self._table.slot_of(live)
        assert slot is not None, "read without a slot"
        num_ranges, num_before = ref.place.num_ranges, one.num_done
        num_now = max(1, max_bytes // ref.place.range_bytes)
        try:
            for number in range(num_before, min(num_before + num_now, num_ranges)):
                self._pool.fill(number, slot, ref.num_tokens, _range_of(reading, number))
                one.num_done += 1
            if one.num_done == num_ranges:
                reading.check()
        except BoundaryError as error:
            one.reason = error.reason
            self._give_back(live, slot)
        one.read_s += time.perf_counter() - started_s
        is_over = one.reason or one.num_done == num_ranges
        num_bytes = (one.num_done - num_before) * ref.place.range_bytes
        return (self._arrived(one, live, version) if is_over else None), num_bytes

    def _why_not(self, ref: KVRef, live: Live, version: int) -> str:
        if self._mode == "off":
            return "handoff is off"
        reason = refusal_of(ref, live.ids, version=version, model=self._model)
        if reason:
            return reason
        place, pool = ref.place, self._pool
        if (place.num_ranges, place.range_bytes) != pool.ranges_of(ref.num_tokens):
            ranges = f"{place.num_ranges} ranges of {place.range_bytes} bytes"
            return f"its place has {ranges} for {ref.num_tokens} tokens"
        return self._why_compute(ref) if self._mode == "auto" else ""

    def _why_compute(self, ref: KVRef) -> str:
        """What was not measured yet is read; so is one of some that would be computed, since speeds
        change."""
        prefill, transfer = self.prefill.per_s, self.transfer.per_s
        if prefill is None or transfer is None:
            return ""
        compute_s, read_s = ref.num_tokens / prefill, ref.place.num_bytes / transfer
        self._num_computed += read_s >= compute_s
        if read_s < compute_s or self._num_computed > TRY_AGAIN_AFTER:
            self._num_computed = 0
            return ""
        return f"computing takes about {compute_s:.3g} s, reading {read_s:.3g} s"

    def _open(self, one: _Import) -> None:
        started_s = time.perf_counter()
        try:
            one.reading = open_reading(one.ref.place)
        except BoundaryError as error:
            one.reason = error.reason
        one.read_s = time.perf_counter() - started_s

    def _reading_for(self, one: _Import, live: Live, version: int) -> KVReading | None:
        """None, with the reason, where nothing is to be copied; its slot is reserved else."""
        if one.reason or one.reading is None or one.num_done:
            return None if one.reason else one.reading
        if one.ref.version != version:
            one.reason = f"it is of version {one.ref.version}, here is {version}"
        elif self._table.num_reusable(live) >= one.ref.num_tokens:
            one.reason, one.is_here_already = "it is cached here already", True
        elif self._table.reserve(live) is None:
            one.reason = "no slot is free"
        return None if one.reason else one.reading

    def _give_back(self, live: Live, slot: int) -> None:
        """What was read cannot be trusted; the request gets a slot like any other."""
        self._pool.scrub(slot)
        self._table.spoil(live)
        self._table.free(live)

    def _arrived(self, one: _Import, live: Live, version: int) -> KVTaken:
        if not one.reason:
            num_to_compute = 1 if live.num_left > 0 else 0
            most = len(live.ids) - num_to_compute
            self._table.arrived(live, min(one.ref.num_tokens, most))
            self.transfer.measured(one.ref.place.num_bytes, one.read_s)
            self.num_tokens += one.ref.num_tokens
        return self._over(one, version)

    def _over(self, one: _Import, version: int) -> KVTaken:
        one.is_over = True
        one.close()
        if one.was_late:
            self.transfer.measured(one.ref.place.num_bytes, one.read_s)
        is_read = not one.reason
        return KVTaken(
            ref=one.ref.ref,
            num_tokens=one.ref.num_tokens if is_read or one.is_here_already else 0,
            version=version,
            num_bytes=one.ref.place.num_bytes if is_read else 0,
            read_s=one.read_s,
            reason=one.reason,
        )


def _range_of(reading: KVReading, number: int) -> Callable[..., None]:
    return lambda into: reading.copy(number, into)


async def _wait(one: _Import, reading: KVReading, on_ready: Callable[[], None]) -> None:
    started_s = time.perf_counter()
    try:
        async with asyncio.timeout(one.ref.lease_s):
            await reading.wait_here()
    except BoundaryError as error:
        one.reason = error.reason
    except TimeoutError:
        one.reason, one.was_late = "it was not here when its lease ended", True
    one.read_s += time.perf_counter() - started_s
    on_ready()
