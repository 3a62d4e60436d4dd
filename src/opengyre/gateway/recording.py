"""Turn records on their way out: appended, synced together, only then told.

Must not know: HTTP, sessions. Invariants: records are told in the order they were put; nobody is
told before its bytes are durable; the queue is bounded, and a full one makes turns wait. A record
that cannot be written ends the gateway: `run` raises, and no turn goes on unrecorded.
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
        self._queue: asyncio.Queue[TokenRecord] = asyncio.Queue(MAX_QUEUED)
        self._failure: BoundaryError | None = None

    async def put(self, record: TokenRecord) -> None:
        """Raises BoundaryError once a record could not be written."""
        self._check()
        await self._queue.put(record)

    async def drained(self) -> None:
        """Return when everything put so far was told. Raises BoundaryError if it never will."""
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
            records = [await self._queue.get(), *self._take_all()]
            try:
                refs = [self._recorder.append(record) for record in records]
                await self._recorder.sync()
            except BoundaryError as error:
                self._failure = error
                for _ in [*records, *self._take_all()]:
                    self._queue.task_done()
                raise
            for record, ref in zip(records, refs, strict=True):
                self._on_turn(msgspec.structs.replace(record.header, ref=ref))
                self._queue.task_done()

    def _take_all(self) -> list[TokenRecord]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
