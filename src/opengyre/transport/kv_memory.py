"""One KV pool's bytes in memory that other processes of this host can read.

Owns: the memory, its guards, reading it from another process. Must not know: layers, tokens.
Invariants: each slot has one guard, the key of its pin, which is gone before `unpin` returns, so a
reader that ends after the slot was given away finds another one; nothing is left of a killed
process, or of a pool that was dropped unclosed; pages are touched only as they are used.
"""

import contextlib
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Sequence

import numpy as np

from opengyre.control.errors import InvariantError
from opengyre.seams.kv import KVPlace
from opengyre.transport.kv import Bytes, gone

KIND = "shm"
_MAGIC = b"GYREKV01"
_KEY_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _KEY_BYTES
_NO_KEY = bytes(_KEY_BYTES)
_MADV_POPULATE_READ = 22


class KVMemory:
    """`view` [num_bytes] is uint8. Lives in an anonymous file, which is bounded by memory alone, so
    that touching its pages cannot fail like those of a full mount."""

    def __init__(self, num_bytes: int, *, num_slots: int) -> None:
        self._token = secrets.token_bytes(_KEY_BYTES)
        self._num_slots = num_slots
        self._slots: dict[str, int] = {}
        head_bytes = _pages(_HEAD_BYTES + num_slots * _KEY_BYTES)
        self._offset_bytes = head_bytes
        self._fd = os.memfd_create("gyre-kv", os.MFD_CLOEXEC)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, head_bytes + num_bytes)
        self._mapped = mmap.mmap(self._fd, head_bytes + num_bytes, flags=mmap.MAP_SHARED)
        self._mapped[:_HEAD_BYTES] = _MAGIC + self._token
        self.view: Bytes | None = np.frombuffer(self._mapped, np.uint8, num_bytes, head_bytes)

    def pin(self, slot: int, ranges: Sequence[tuple[int, int]]) -> KVPlace:
        """`ranges` are (offset, num_bytes) in the view, of equal size. One pin for each slot."""
        key = secrets.token_bytes(_KEY_BYTES)
        self._set_guard(slot, key)
        self._slots[key.hex()] = slot
        starts = ",".join(str(self._offset_bytes + start) for start, _ in ranges)
        return KVPlace(
            kind=KIND,
            address=f"{os.getpid()}/{self._fd}/{self._token.hex()}/{slot}/{starts}",
            key=key.hex(),
            num_ranges=len(ranges),
            range_bytes=ranges[0][1],
        )

    def unpin(self, key: str) -> None:
        """A reader that has not ended by now is refused. Idempotent."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._set_guard(slot, _NO_KEY)

    def close(self) -> None:
        """Every pin ends; memory is back with the system once the last reader closed. Raises
        InvariantError if somebody here still has a view of it. Idempotent."""
        if self._mapped.closed:
            return
        for key in list(self._slots):
            self.unpin(key)
        self.view = None
        try:
            self._mapped.close()
        except BufferError as error:
            raise InvariantError("KV memory is still referenced after release") from error
        self._close_fd()

    def _set_guard(self, slot: int, key: bytes) -> None:
        start = _guard_bytes(slot)
        self._mapped[start : start + _KEY_BYTES] = key


class MemoryReading:
    """Maps the other process's memory, read only."""

    def __init__(self, place: KVPlace) -> None:
        """Raises BoundaryError for a place that is gone, or none."""
        try:
            pid, fd, token, slot, starts = place.address.split("/")
            path = f"/proc/{int(pid)}/fd/{int(fd)}"
            self._slot = int(slot)
            self._starts = [int(start) for start in starts.split(",")]
            self._key = bytes.fromhex(place.key)
            expected = _MAGIC + bytes.fromhex(token)
        except ValueError as error:
            raise gone("its address is none of shared memory") from error
        self._range_bytes = place.range_bytes
        self._mapped = _map(path)
        self._view: Bytes | None = np.frombuffer(self._mapped, np.uint8)
        try:
            self._check_place(place, expected)
            self.check()
        except BaseException:
            self.close()
            raise

    def is_here(self) -> bool:
        return True

    async def wait_here(self) -> None:
        """It is."""

    def copy(self, number: int, into: Bytes) -> None:
        if self._view is None:
            raise gone("the reading is closed")
        start = self._starts[number]
        self._populate(start)
        np.copyto(into, self._view[start : start + self._range_bytes])

    def _populate(self, start: int) -> None:
        """Map the pages of a range at once: a fault for each costs a fifth of the time."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # before Linux 5.14
            self._mapped.madvise(_MADV_POPULATE_READ, first, start + self._range_bytes - first)

    def check(self) -> None:
        start = _guard_bytes(self._slot)
        if self._mapped.closed or self._mapped[start : start + _KEY_BYTES] != self._key:
            raise gone("its lease is over")

    def close(self) -> None:
        self._view = None
        self._mapped.close()

    def _check_place(self, place: KVPlace, expected: bytes) -> None:
        size = len(self._mapped)
        if self._mapped[:_HEAD_BYTES] != expected:
            raise gone("what is there now is other memory")
        is_slot = self._slot >= 0 and _guard_bytes(self._slot + 1) <= size
        is_inside = all(0 <= start <= size - place.range_bytes for start in self._starts)
        if len(self._starts) != place.num_ranges or place.range_bytes < 1:
            raise gone(f"{len(self._starts)} ranges of {place.range_bytes} bytes are no prefix")
        if not is_slot or not is_inside or len(self._key) != _KEY_BYTES:
            raise gone(f"it lies outside the {size} bytes that are there")


def _map(path: str) -> mmap.mmap:
    """Raises BoundaryError if that is no memory that can be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise gone("what is there now is no memory")
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise gone(f"its memory cannot be reached: {error}") from error


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _guard_bytes(slot: int) -> int:
    """Where the guard of a slot begins."""
    return _HEAD_BYTES + slot * _KEY_BYTES
