"""The stream of one request's chunks: a writing end for an engine, a reading end for its caller.

Owns: coalescing and the promise of exactly one terminal chunk. Must not know: what an engine is.
Invariants: a slow reader costs at most one pending chunk for each policy version (ids of one
version are merged) and one for what was taken, so a stream is bounded by the request's tokens;
nothing is written after the terminal chunk, which carries no ids; a reader that is closed or
dropped before the terminal chunk tells so once through `on_abandon`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from opengyre.seams.engine import Chunk, Finish
from opengyre.seams.kv import KVRef, KVTaken


class _Pending:
    """Ids of one policy_version that were not read yet; what became of a `kv`, alone."""

    __slots__ = ("ids", "logprobs", "policy_version", "taken")

    def __init__(self, policy_version: int, taken: KVTaken | None = None) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.policy_version = policy_version
        self.taken = taken


class ChunkStream:
    """The writing end. Used on one event loop."""

    __slots__ = ("_ended", "_pending", "_ready", "_terminal", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0
        self._pending: deque[_Pending] = deque()
        self._terminal: Chunk | None = None
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        return self._terminal is not None

    def put(self, ids: list[int], logprobs: list[float], policy_version: int) -> None:
        """Queue sampled ids (same length as logprobs); dropped after the terminal chunk."""
        if self._terminal is not None:
            return
        last = self._pending[-1] if self._pending else None
        if last is None or last.taken or last.policy_version != policy_version:
            self._pending.append(_Pending(policy_version))
        self._pending[-1].ids += ids
        self._pending[-1].logprobs += logprobs
        self.num_tokens += len(ids)
        self._ready.set()

    def put_taken(self, taken: KVTaken) -> None:
        """Queue a chunk that says what became of the request's `kv`."""
        if self._terminal is None:
            self._pending.append(_Pending(0, taken))
            self._ready.set()

    def end(
        self, finish: Finish, *, policy_version: int, reason: str = "", kv: KVRef | None = None
    ) -> None:
        """Queue the terminal chunk. The first one counts; later ones are ignored."""
        if self._terminal is None:
            self._terminal = Chunk(
                policy_version=policy_version, finish=finish, reason=reason, kv=kv
            )
            self._ready.set()
            self._ended.set()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def take(self) -> Chunk:
        """The next chunk; after the terminal one it is the terminal one again."""
        await self._ready.wait()
        if self._pending:
            head = self._pending.popleft()
            if not self._pending and self._terminal is None:
                self._ready.clear()
            if head.taken is not None:
                return Chunk(taken=head.taken)
            return Chunk(ids=head.ids, logprobs=head.logprobs, policy_version=head.policy_version)
        assert self._terminal is not None, "ready without a chunk"
        return self._terminal


class ChunkReader:
    """The reading end: an async iterator up to and including the terminal chunk."""

    __slots__ = ("_is_over", "_loop", "_on_abandon", "_stream")

    def __init__(self, stream: ChunkStream, *, on_abandon: Callable[[], None]) -> None:
        self._stream = stream
        self._on_abandon = on_abandon
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    def __aiter__(self) -> "ChunkReader":
        return self

    async def __anext__(self) -> Chunk:
        if self._is_over:
            raise StopAsyncIteration
        chunk = await self._stream.take()
        self._is_over = chunk.finish is not None
        return chunk

    async def aclose(self) -> None:
        """Give up reading; a request that still runs is cancelled."""
        self._abandon()

    def __del__(self) -> None:
        """The collector may run in any thread, so the loop is told, not called."""
        is_unfinished = not self._is_over and not self._stream.is_ended
        if is_unfinished and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_abandon)

    def _abandon(self) -> None:
        if not self._is_over:
            self._is_over = True
            if not self._stream.is_ended:
                self._on_abandon()


async def collect(chunks: AsyncIterator[Chunk]) -> Chunk:
    """All of a stream in one chunk: ids, logprobs and the terminal chunk's finish and reason."""
    ids: list[int] = []
    logprobs: list[float] = []
    last = Chunk()
    async for last in chunks:
        ids += last.ids
        logprobs += last.logprobs
    return msgspec.structs.replace(last, ids=ids, logprobs=logprobs)
