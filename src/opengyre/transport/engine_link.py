"""A caller's end of an engine link: an engine in another process, asked like one in this one.

Owns: the streams of its requests, and the fence against chunks of those that are over. Must not
know: roles, weights, who asks. Invariants: a lost connection ends each request with one `error`
chunk whose reason is ENGINE_LOST; a caller that stops reading cancels its request.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from opengyre.seams.engine import ENGINE_LOST, Chunk, EngineCaps, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVRelease, KVTaken
from opengyre.transport import engine_messages as m
from opengyre.transport.chunk_stream import ChunkReader, ChunkStream
from opengyre.transport.framed import Peer, connect

OnPrefixes = Callable[[list[KVRef]], Collection[str]]
"""Idle prefixes of an engine; returns the references it will release."""


class RemoteEngine:
    """The caller's end of an engine link. `lost` is set when the connection is gone.

    `num_fenced_chunks` counts chunks of requests that were already over here, and messages
    that no engine sends.
    """

    def __init__(self, address: str, *, name: str, on_prefixes: OnPrefixes | None = None) -> None:
        self.name = name
        self.lost = asyncio.Event()
        self.num_fenced_chunks = 0
        self._address = address
        self._on_prefixes = on_prefixes
        self._streams: dict[str, ChunkStream] = {}
        self._peer: Peer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._caps: EngineCaps | None = None

    async def open(self) -> None:
        """Connect and learn the caps. Raises BoundaryError if nobody answers."""
        self._peer = await connect(
            self._address, wire=m.LINK_WIRE, handler=self._handle, name=self.name
        )
        self._reading = asyncio.get_running_loop().create_task(self._read(self._peer))
        told = await self._call(m.AskCaps())
        self._caps = told.caps

    async def close(self) -> None:
        """Hang up; requests that still run end with ENGINE_LOST."""
        if self._peer is not None:
            self._peer.close()
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def submit(self, request: GenerateRequest) -> ChunkReader:
        """The request is sent at once. `aclose`, or dropping the reader, cancels it."""
        stream = ChunkStream()
        request_id = request.request_id
        if self._peer is None or self.lost.is_set():
            stream.end(Finish.ERROR, policy_version=0, reason=ENGINE_LOST)
        elif request_id in self._streams:
            reason = f"request {request_id} is already here"
            stream.end(Finish.ERROR, policy_version=0, reason=reason)
        else:
            self._streams[request_id] = stream
            self._peer.notify(m.Submit(request=request))
        return ChunkReader(stream, on_abandon=lambda: self._abandon(request_id, stream))

    async def freeze(self, request_id: str, *, keeps_kv: bool = False) -> None:
        """Returns when its terminal chunk is queued here. Raises BoundaryError when lost."""
        await self._call(m.Freeze(request_id=request_id, keeps_kv=keeps_kv))

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        """Everything of the engine, also what other callers asked for."""
        await self._call(m.Freeze(keeps_kv=keeps_kv))

    async def cancel(self, request_id: str) -> None:
        await self._call(m.Cancel(request_id=request_id))

    async def import_kv(self, ref: KVRef) -> KVTaken:
        """Raises BoundaryError when the engine is lost."""
        told = await self._call(m.ImportKV(ref=ref))
        taken: KVTaken = told.taken
        return taken

    async def release_kv(self, ref: str) -> KVRelease:
        """Raises BoundaryError when the engine is lost."""
        told = await self._call(m.ReleaseKV(ref=ref))
        release: KVRelease = told.release
        return release

    def caps(self) -> EngineCaps:
        assert self._caps is not None, "caps before open"
        return self._caps

    async def _call(self, message: m.LinkMessage) -> Any:
        if self._peer is None:
            raise BoundaryError(self.name, "the link is not open", retryable=True)
        return await self._peer.call(message, timeout_s=m.CALL_DEADLINE_S)

    async def _read(self, peer: Peer) -> None:
        try:
            await peer.run()
        finally:
            self.lost.set()
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.end(Finish.ERROR, policy_version=0, reason=ENGINE_LOST)

    async def _handle(self, message: Any) -> m.LinkMessage | None:
        match message:
            case m.ChunksTold(chunks=chunks):
                for request_id, chunk in chunks:
                    self._take(request_id, chunk)
            case m.PrefixesOffered(refs=refs):
                return m.PrefixesClaimed(refs=self._claimed(refs))
            case _:
                self.num_fenced_chunks += 1
        return None

    def _claimed(self, refs: list[KVRef]) -> list[str]:
        return [] if self._on_prefixes is None else list(self._on_prefixes(refs))

    def _take(self, request_id: str, chunk: Chunk) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            self.num_fenced_chunks += 1
            return
        if chunk.taken is not None:
            stream.put_taken(chunk.taken)
        if chunk.ids:
            stream.put(chunk.ids, chunk.logprobs, chunk.policy_version)
        if chunk.finish is not None:
            del self._streams[request_id]
            stream.end(
                chunk.finish,
                policy_version=chunk.policy_version,
                reason=chunk.reason,
                kv=chunk.kv,
            )

    def _abandon(self, request_id: str, stream: ChunkStream) -> None:
        if self._streams.get(request_id) is not stream:
            return
        del self._streams[request_id]
        stream.end(Finish.CANCELLED, policy_version=0)
        if self._peer is not None:
            self._peer.notify(m.Abandon(request_id=request_id))
