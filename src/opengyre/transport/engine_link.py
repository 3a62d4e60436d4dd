"""The engine link: the request half of the engine seam over one framed connection.

Owns: EngineServer (beside an engine) and RemoteEngine (in another process), the door, and the
fence against chunks of requests that are over. Must not know: roles, weights, who asks.
Pausing, updates and memory go over the controller's connection, never here.
Invariants: an acknowledgement of freeze or cancel is written after the terminal chunk; a lost
connection ends each request with one `error` chunk whose reason is ENGINE_LOST; a caller that
stops reading cancels its request; an idle prefix that no caller claims is kept no longer.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

import msgspec

from opengyre.seams.engine import Chunk, Engine, EngineCaps, EngineStats, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVRelease, KVTaken
from opengyre.transport.chunk_stream import ChunkReader, ChunkStream
from opengyre.transport.framed import Peer, Wire, connect, serve

ENGINE_LOST = "engine lost"
DOOR_IS_CLOSED = "door is closed"
CALL_DEADLINE_S = 150.0
OFFER_DEADLINE_S = 2.0

OnPrefixes = Callable[[list[KVRef]], Collection[str]]
"""Idle prefixes of an engine; returns the references it will release."""


class LinkMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the link's messages; the tag is the class name."""


class Submit(LinkMessage, frozen=True, kw_only=True):
    request: GenerateRequest


class Freeze(LinkMessage, frozen=True, kw_only=True):
    """Answered once the terminal chunk was sent. No id: everything of the engine."""

    request_id: str | None = None
    keeps_kv: bool = False


class Cancel(LinkMessage, frozen=True, kw_only=True):
    request_id: str


class Abandon(LinkMessage, frozen=True, kw_only=True):
    """A notification: the caller stopped reading; what still comes is dropped there."""

    request_id: str


class AskCaps(LinkMessage, frozen=True, kw_only=True):
    pass


class CapsTold(LinkMessage, frozen=True, kw_only=True):
    caps: EngineCaps


class AskStats(LinkMessage, frozen=True, kw_only=True):
    pass


class StatsTold(LinkMessage, frozen=True, kw_only=True):
    stats: EngineStats


class ChunksTold(LinkMessage, frozen=True, kw_only=True):
    """Chunks of several requests, in order for each: one frame for each step of the engine."""

    chunks: list[tuple[str, Chunk]]


class ImportKV(LinkMessage, frozen=True, kw_only=True):
    ref: KVRef


class TakenTold(LinkMessage, frozen=True, kw_only=True):
    taken: KVTaken


class ReleaseKV(LinkMessage, frozen=True, kw_only=True):
    """Answered at once, the door shut or not."""

    ref: str


class ReleaseTold(LinkMessage, frozen=True, kw_only=True):
    release: KVRelease


class PrefixesOffered(LinkMessage, frozen=True, kw_only=True):
    """The engine asks: whose are these idle prefixes?"""

    refs: list[KVRef]


class PrefixesClaimed(LinkMessage, frozen=True, kw_only=True):
    """The caller will release these."""

    refs: list[str]


LINK_WIRE = Wire(*LinkMessage.__subclasses__())


class _Connection:
    """One caller of the engine: pumps chunks of its requests into its connection."""

    def __init__(self, engine: Engine, server: "EngineServer") -> None:
        self._engine = engine
        self._server = server
        self._outbox: list[tuple[str, Chunk]] = []
        self._wake = asyncio.Event()
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._peer: Peer | None = None

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve until end of file; then cancel what the caller left behind."""
        peer = Peer(reader, writer, wire=LINK_WIRE, handler=self._handle, name="engine link")
        self._peer = peer
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            sender = tasks.create_task(self._send_loop(peer))
            await peer.run()
            sender.cancel()
            for request_id in list(self._pumps):
                await self._engine.cancel(request_id)

    def hang_up(self) -> None:
        if self._peer is not None:
            self._peer.close()

    async def settle(self, request_ids: list[str]) -> None:
        """Wait until the terminal chunks of these requests are written to the connection."""
        pumps = [self._pumps[one] for one in request_ids if one in self._pumps]
        if pumps:
            await asyncio.wait(pumps, timeout=CALL_DEADLINE_S)
        self._send_now()

    def request_ids(self) -> list[str]:
        return list(self._pumps)

    async def offer(self, refs: list[KVRef]) -> list[str]:
        """Those that the caller claims; a caller that does not answer claims none."""
        if self._peer is None:
            return []
        try:
            told = await self._peer.call(PrefixesOffered(refs=refs), timeout_s=OFFER_DEADLINE_S)
        except BoundaryError:
            return []
        return told.refs if isinstance(told, PrefixesClaimed) else []

    async def _handle(self, message: Any) -> LinkMessage | None:
        match message:
            case Submit(request=request):
                self._submit(request)
            case Freeze(request_id=None, keeps_kv=keeps_kv):
                await self._server.freeze_all(keeps_kv=keeps_kv)
            case Freeze(request_id=str(request_id), keeps_kv=keeps_kv):
                await self._engine.freeze(request_id, keeps_kv=keeps_kv)
                await self.settle([request_id])
            case ImportKV(ref=ref):
                return TakenTold(taken=await self._import(ref))
            case ReleaseKV(ref=name):
                return ReleaseTold(release=await self._engine.release_kv(name))
            case Cancel(request_id=request_id):
                await self._engine.cancel(request_id)
                await self.settle([request_id])
            case Abandon(request_id=request_id):
                assert self._tasks is not None, "served before run"
                self._tasks.create_task(self._engine.cancel(request_id))
            case AskStats():
                return StatsTold(stats=self._engine.stats())
            case AskCaps():
                return CapsTold(caps=self._engine.caps())
            case _:
                what = f"unexpected {type(message).__name__}"
                raise BoundaryError("engine link", what, retryable=False)
        return None

    async def _import(self, ref: KVRef) -> KVTaken:
        """An engine that is about to leave takes nothing in."""
        if not self._server.is_door_open:
            return KVTaken(ref=ref.ref, num_tokens=0, reason=DOOR_IS_CLOSED)
        return await self._engine.import_kv(ref)

    def _submit(self, request: GenerateRequest) -> None:
        assert self._tasks is not None, "served before run"
        request_id = request.request_id
        if not self._server.is_door_open:
            version = self._engine.stats().version
            terminal = Chunk(policy_version=version, finish=Finish.FROZEN, reason=DOOR_IS_CLOSED)
            self._tell(request_id, terminal)
        elif request_id in self._pumps:
            reason = f"request {request_id} is already here"
            self._tell(request_id, Chunk(finish=Finish.ERROR, reason=reason))
        else:
            chunks = self._engine.submit(request)
            self._pumps[request_id] = self._tasks.create_task(self._pump(request_id, chunks))

    async def _pump(self, request_id: str, chunks: Any) -> None:
        try:
            async for chunk in chunks:
                self._tell(request_id, chunk)
        finally:
            del self._pumps[request_id]

    def _tell(self, request_id: str, chunk: Chunk) -> None:
        self._outbox.append((request_id, chunk))
        self._wake.set()

    def _send_now(self) -> None:
        if self._outbox and self._peer is not None:
            chunks, self._outbox = self._outbox, []
            self._peer.notify(ChunksTold(chunks=chunks))

    async def _send_loop(self, peer: Peer) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)
            self._send_now()
            await peer.flush()


class EngineServer:
    """Serves one engine at `address` (`unix:PATH` or `tcp:HOST:0`) while entered.

    The door is open at first. `close_door` answers new submits with an immediate `frozen` chunk
    without tokens; `freeze_all` ends what runs and returns when every terminal chunk is written.
    """

    def __init__(self, engine: Engine, address: str) -> None:
        self.address = address
        self.is_door_open = True
        self._engine = engine
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._connections: dict[_Connection, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._server, self.address = await serve(self.address, self._on_connection)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.hang_up()
        if self._connections:
            await asyncio.wait(list(self._connections.values()), timeout=CALL_DEADLINE_S)

    def close_door(self) -> None:
        self.is_door_open = False

    def open_door(self) -> None:
        self.is_door_open = True

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        """Freeze every request of the engine; each terminal chunk is written on return, and with
        `keeps_kv` the callers were asked whose the idle prefixes are."""
        ids = [(connection, connection.request_ids()) for connection in self._connections]
        await self._engine.freeze_all(keeps_kv=keeps_kv)
        for connection, request_ids in ids:
            await connection.settle(request_ids)
        if keeps_kv and (refs := await self._engine.export_kv()):
            await self._offer(refs)

    async def _offer(self, refs: list[KVRef]) -> None:
        answers = await asyncio.gather(*(one.offer(refs) for one in self._connections))
        claimed = {ref for answer in answers for ref in answer}
        for ref in refs:
            if ref.ref not in claimed:
                await self._engine.release_kv(ref.ref)

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._is_closed:  # accepted before, begun after
            writer.close()
            return
        connection = _Connection(self._engine, self)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.run(reader, writer)
        finally:
            del self._connections[connection]


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
            self._address, wire=LINK_WIRE, handler=self._handle, name=self.name
        )
        self._reading = asyncio.get_running_loop().create_task(self._read(self._peer))
        told = await self._call(AskCaps())
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
            self._peer.notify(Submit(request=request))
        return ChunkReader(stream, on_abandon=lambda: self._abandon(request_id, stream))

    async def freeze(self, request_id: str, *, keeps_kv: bool = False) -> None:
        """Returns when its terminal chunk is queued here. Raises BoundaryError when lost."""
        await self._call(Freeze(request_id=request_id, keeps_kv=keeps_kv))

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        """Everything of the engine, also what other callers asked for."""
        await self._call(Freeze(keeps_kv=keeps_kv))

    async def cancel(self, request_id: str) -> None:
        await self._call(Cancel(request_id=request_id))

    async def import_kv(self, ref: KVRef) -> KVTaken:
        """Raises BoundaryError when the engine is lost."""
        told = await self._call(ImportKV(ref=ref))
        taken: KVTaken = told.taken
        return taken

    async def release_kv(self, ref: str) -> KVRelease:
        """Raises BoundaryError when the engine is lost."""
        told = await self._call(ReleaseKV(ref=ref))
        release: KVRelease = told.release
        return release

    async def ask_stats(self) -> EngineStats:
        told = await self._call(AskStats())
        stats: EngineStats = told.stats
        return stats

    def caps(self) -> EngineCaps:
        assert self._caps is not None, "caps before open"
        return self._caps

    async def _call(self, message: LinkMessage) -> Any:
        if self._peer is None:
            raise BoundaryError(self.name, "the link is not open", retryable=True)
        return await self._peer.call(message, timeout_s=CALL_DEADLINE_S)

    async def _read(self, peer: Peer) -> None:
        try:
            await peer.run()
        finally:
            self.lost.set()
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.end(Finish.ERROR, policy_version=0, reason=ENGINE_LOST)

    async def _handle(self, message: Any) -> LinkMessage | None:
        match message:
            case ChunksTold(chunks=chunks):
                for request_id, chunk in chunks:
                    self._take(request_id, chunk)
            case PrefixesOffered(refs=refs):
                return PrefixesClaimed(refs=self._claimed(refs))
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
            self._peer.notify(Abandon(request_id=request_id))
