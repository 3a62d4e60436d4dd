"""The disk of a seeded world: a journal without a thread, and what survives when power goes.

Owns: which rows and which token bytes were synced. Must not know: what a row means. Invariants:
the journal's own append, waiting and group commit run as they are; a crash keeps the synced
prefix, and of what was being written a part (token bytes) or all or nothing (a transaction).
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from opengyre.seams.records import SegmentRef
from opengyre.store.codec import JournalValue, decode, kind_of
from opengyre.store.journal import BATCH_S, Journal, Row
from tests.sim.seeded_hosts import WorldLoop


class Disk:
    """`rows` of the journal that are synced; `writing` is the transaction under way."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.writing: list[Any] = []
        self.synced_bytes: dict[str, int] = {}

    def note_sync(self, name: str, call: "partial[Any]") -> None:
        """Told by the loop after a thread's work: token files were synced, by their writer or by
        the next life of one that died."""
        if name == "_sync_files":
            for fd in call.args[-1]:
                self.synced_bytes[os.readlink(f"/proc/self/fd/{fd}")] = os.fstat(fd).st_size
        if name == "make_durable":
            folder, segments = call.args[-2:]
            for path in [folder / f"{segment:04d}.seg" for segment in segments]:
                self.synced_bytes[str(path)] = path.stat().st_size

    def is_synced(self, tokens: Path, ref: SegmentRef) -> bool:
        """Is this token record on disk?"""
        path = tokens / f"{ref.segment:04d}.seg"
        return self.synced_bytes.get(str(path), 0) > ref.offset_bytes

    def lose_power(self, rng: Random, tokens: Path) -> list[Row]:
        """The rows that are left; token files keep what was synced and a torn tail."""
        if rng.random() < 0.5:
            self.rows += self.writing
        for path in sorted(tokens.glob("*.seg")):
            synced = self.synced_bytes.get(str(path), 0)
            os.truncate(path, rng.randint(min(synced, path.stat().st_size), path.stat().st_size))
        return [row_of(pending) for pending in self.rows]


def row_of(pending: Any) -> Row:
    """A row as a reader of the database sees it."""
    value = decode(pending.body)
    return Row(seq=pending.seq, now_s=pending.now_s, kind=pending.kind, value=value)


class SeededJournal(Journal):
    """`on_row(row)` sees each row as it is appended."""

    def __init__(self, path: Path, loop: WorldLoop, disk: Disk) -> None:
        super().__init__(path)
        self._world = loop
        self._disk = disk
        self._is_writing = False
        self.on_row: Callable[[Row], None] = lambda row: None

    def append(self, now_s: float, value: JournalValue) -> int:
        seq = super().append(now_s, value)
        if not self._is_writing:
            self._is_writing = True
            self._world.call_later(BATCH_S, self._gather_batch)
        self.on_row(Row(seq=seq, now_s=now_s, kind=kind_of(value), value=value))
        return seq

    def _gather_batch(self) -> None:
        batch = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        self._disk.writing = batch
        self._world.call_later(self._world.delay_s("commit"), self._commit_batch, batch)

    def _commit_batch(self, batch: list[Any]) -> None:
        self._disk.rows += batch
        self._disk.writing = []
        self._settle(batch[-1].seq, None)
        self._is_writing = False
        if self._queue.qsize():
            self._is_writing = True
            self._world.call_later(BATCH_S, self._gather_batch)

    async def open(self) -> None:
        """There is no thread to start."""

    async def close(self) -> None:
        await self.committed(self.last_seq)
        self._is_closing = True
