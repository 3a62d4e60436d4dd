"""Turn records on their way out: appended at once, synced together, only then told.

Must not know: HTTP, sessions. Invariants: a record is with the kernel when `append` returns, so
that it outlives this process; records are told in the order they were appended, and nobody is told
before its bytes are durable; turns do not begin while too many records wait. A record that cannot
be written ends the gateway: `run` raises, and no turn goes on unrecorded.
"""

import asyncio
from collections.abc import Callable

import msgspec

from opengyre.seams.errors import BoundaryError
from opengyre.seams.recorder import Recorder
from opengyre.seams.records import TokenRecord, TurnRecord

MAX_QUEUED = 1024
DRAIN_TIMEOUT_S = 30.0


class RecordQueue:
    """`run` must be running for records to be told."""

    def __init__(self, recorder: Recorder, *, on_turn: Callable[[TurnRecord], None]) -> None:
        self._recorder = recorder
        self._on_turn = on_turn
        self._queue: asyncio.Queue[TurnRecord | None] = asyncio.Queue()
        self._synced = asyncio.Event()
        self._failure: BoundaryError | None = None

    async def wait_room(self) -> None:
        """Return when few records wait for the disk. Raises BoundaryError once a record could not
        be written."""
        while self._queue.qsize() >= MAX_QUEUED and self._failure is None:
            self._synced.clear()
            await self._synced.wait()
        self._check()

    def append(self, record: TokenRecord) -> bool:
        """Write it. False: the disk refuses, and `run`, `wait_room` and `drained` raise that."""
        try:
            ref = self._recorder.append(record)
        except BoundaryError as error:
            self._failure = self._failure or error
            self._queue.put_nowait(None)
            return False
        self._queue.put_nowait(msgspec.structs.replace(record.header, ref=ref))
        return True

    async def drained(self) -> None:
        """Return when everything appended so far was told. Raises BoundaryError if it never
        will."""
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await self._queue.join()
        except TimeoutError as error:
            reason = f"{self._queue.qsize()} records were not synced in {DRAIN_TIMEOUT_S:g} s"
            raise BoundaryError("tokens", reason, retryable=False) from error
        self._check()

    async def run(self) -> None:
        """Until cancelled. Raises what the recorder raises; then nobody waits any more."""
        while True:
            turns = [await self._queue.get(), *self._take_all()]
            try:
                await self._recorder.sync()
                self._check()
            except BoundaryError as error:
                self._failure = error
                self._let_go(len(turns) + len(self._take_all()))
                raise
            for turn in turns:
                if turn is not None:
                    self._on_turn(turn)
            self._let_go(len(turns))

    def _take_all(self) -> list[TurnRecord | None]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _let_go(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self._queue.task_done()
        self._synced.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
