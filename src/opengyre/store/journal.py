"""The run's one truth: every fact, plan and observation in order, in `run.db`.

Owns: the database file, its single writer, group commit, and reading it back. Must not know:
what a row means to the scheduler. Invariants: `committed(seq)` returns only when the row survives
kill -9; rows keep the order in which they were appended; a failed commit fails every later call.
"""

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.store import derive
from opengyre.store.codec import JournalValue, decode, encode, kind_of
from opengyre.store.observations import SCHEMA

BATCH_S = 0.005
MAX_PENDING_ROWS = 100_000
COMMIT_TIMEOUT_S = 30.0

_JOURNAL_DDL = (
    "CREATE TABLE journal(seq INTEGER PRIMARY KEY, now_s REAL NOT NULL, kind TEXT NOT NULL,"
    " body TEXT NOT NULL) STRICT"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One journal row; `seq` counts from 1, `now_s` is seconds since the run began."""

    seq: int
    now_s: float
    kind: str
    value: JournalValue


@dataclass(frozen=True, slots=True)
class _Pending:
    seq: int
    now_s: float
    kind: str
    body: bytes
    value: JournalValue


class Journal:
    """The single writer, for one asyncio loop. Made by `open_journal`.

    Its thread owns the database; everything else happens in the loop.
    """

    def __init__(self, path: Path) -> None:
        self.failure: BoundaryError | None = None
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._next_seq = 1
        self._committed_seq = 0
        self._queue: SimpleQueue[_Pending | None] = SimpleQueue()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)

    @property
    def last_seq(self) -> int:
        """The newest appended row (0 before the first)."""
        return self._next_seq - 1

    @property
    def committed_seq(self) -> int:
        return self._committed_seq

    def append(self, now_s: float, value: JournalValue) -> int:
        """Take a row; returns its seq at once. It is durable after `committed(seq)`.

        Raises BoundaryError("journal") when the disk failed before, when the writer is
        `MAX_PENDING_ROWS` behind, or for a value the journal cannot hold.
        """
        if self.failure is not None:
            raise self.failure
        seq = self._next_seq
        if self._is_closing or seq - self._committed_seq > MAX_PENDING_ROWS:
            reason = "is closed" if self._is_closing else f"is {MAX_PENDING_ROWS} rows behind"
            raise BoundaryError("journal", reason, retryable=False)
        row = _Pending(seq, now_s, kind_of(value), encode(value), value)
        self._queue.put(row)
        self._next_seq += 1
        return seq

    async def committed(self, seq: int, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        """Return once row `seq` and all before it are durable. Raises BoundaryError."""
        if self.failure is not None:
            raise self.failure
        if seq <= self._committed_seq:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((seq, future))
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError as error:
            reason = f"row {seq} not on disk after {timeout_s:g} s"
            raise BoundaryError("journal", reason, retryable=False) from error

    async def record(self, now_s: float, value: JournalValue) -> int:
        """`append`, then `committed`."""
        seq = self.append(now_s, value)
        await self.committed(seq)
        return seq

    async def open(self) -> None:
        """Start the writer. Raises ConfigError (see `open_journal`)."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((0, ready))
        self._thread.start()
        await ready

    async def close(self) -> None:
        """Write what was appended and end the writer."""
        self._is_closing = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, COMMIT_TIMEOUT_S)
        if self._thread.is_alive():
            reason = f"still writing after {COMMIT_TIMEOUT_S:g} s"
            raise BoundaryError("journal", reason, retryable=False)

    def _write(self) -> None:
        """The writer thread: one transaction for what came in `BATCH_S`, until closed."""
        try:
            with closing(_open_for_writing(self._path)) as db:
                self._tell(_last_seq(db), None)
                while (first := self._queue.get()) is not None:
                    _commit(db, batch := self._gather(first))
                    self._tell(batch[-1].seq, None)
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except ConfigError as error:
            self._tell(0, error)
        except (sqlite3.Error, OverflowError) as error:
            reason = f"cannot write {self._path}: {error}"
            self._tell(0, BoundaryError("journal", reason, retryable=False))
        except BaseException:
            self._tell(0, BoundaryError("journal", "the writer crashed", retryable=False))
            raise

    def _gather(self, first: _Pending) -> list[_Pending]:
        if not self._is_closing:
            time.sleep(BATCH_S)
        batch = [first]
        for _ in range(self._queue.qsize()):
            row = self._queue.get()
            if row is None:
                self._queue.put(None)
                break
            batch.append(row)
        return batch

    def _tell(self, committed_seq: int, failure: BoundaryError | ConfigError | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, committed_seq, failure)

    def _settle(self, committed_seq: int, failure: BoundaryError | ConfigError | None) -> None:
        """In the loop: what the writer thread told."""
        self._committed_seq = max(self._committed_seq, committed_seq)
        self._next_seq = max(self._next_seq, self._committed_seq + 1)
        if isinstance(failure, BoundaryError):
            self.failure = failure
        waiting, self._waiters = self._waiters, deque()
        for seq, future in waiting:
            if failure is None and seq > self._committed_seq:
                self._waiters.append((seq, future))
            elif future.done():
                continue
            elif failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(None)


@asynccontextmanager
async def open_journal(path: Path) -> AsyncIterator[Journal]:
    """Open or make `path` as its only writer; on leaving, everything appended is durable.

    Raises ConfigError if another process writes it or it has another schema, and on leaving the
    BoundaryError of a writer that failed.
    """
    lock = _lock(path)
    try:
        journal = Journal(path)
        await journal.open()
        try:
            yield journal
        finally:
            await journal.close()
        if journal.failure is not None:
            raise journal.failure
    finally:
        os.close(lock)


def read_journal(path: Path, *, after_seq: int = 0) -> Iterator[Row]:
    """Rows in order, also of a run that is being written. Raises ConfigError, BoundaryError."""
    with closing(open_for_reading(path)) as db:
        query = "SELECT seq, now_s, kind, body FROM journal WHERE seq > ? ORDER BY seq"
        try:
            for seq, now_s, kind, body in db.execute(query, (after_seq,)):
                yield Row(seq=seq, now_s=now_s, kind=kind, value=decode(body.encode()))
        except sqlite3.Error as error:
            raise BoundaryError(
                "journal", f"cannot read {path}: {error}", retryable=False
            ) from error


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection. Raises ConfigError if `path` is no run.db of this schema."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a run folder holds a run.db")
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
        found = db.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: not a run.db ({error})") from error
    if found != SCHEMA:
        db.close()
        raise ConfigError(_other_schema(path, found))
    return db


def _other_schema(path: Path, found: int) -> str:
    return f"{path}: schema {found}, but this gyre reads {SCHEMA}; use the gyre that made it"


def _lock(path: Path) -> int:
    lock = os.open(path.with_name("writer.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(f"{path.parent}: another process is writing this run") from error
    return lock


def _open_for_writing(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    if not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
        db.execute("BEGIN IMMEDIATE")
        for statement in (_JOURNAL_DDL, *derive.DDL.split(";")):
            db.execute(statement)
        db.execute(f"PRAGMA user_version={SCHEMA}")
        db.execute("COMMIT")
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found != SCHEMA:
        db.close()
        raise ConfigError(_other_schema(path, found))
    return db


def _last_seq(db: sqlite3.Connection) -> int:
    last_seq: int = db.execute("SELECT COALESCE(MAX(seq), 0) FROM journal").fetchone()[0]
    return last_seq


def _commit(db: sqlite3.Connection, batch: list[_Pending]) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        for row in batch:
            body = row.body.decode()
            db.execute("INSERT INTO journal VALUES(?,?,?,?)", (row.seq, row.now_s, row.kind, body))
            derive.apply(db, row.now_s, row.value)
        db.execute("COMMIT")
    except sqlite3.Error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
