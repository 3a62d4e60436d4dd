"""The engine's end of a link: serves the request half of the engine seam to other processes.

Owns: the connections of callers, the door, whom idle prefixes are offered to. Must not know:
roles, weights, who asks. Invariants: an acknowledgement of freeze or cancel is written after the
terminal chunk; what a caller leaves behind is cancelled; an idle prefix that no caller claims is
kept no longer.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

from opengyre.seams.engine import Chunk, Engine, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVTaken
from opengyre.transport import engine_messages as m
from opengyre.transport.framed import Peer, serve

OFFER_DEADLINE_S = 2.0


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
        peer = Peer(reader, writer, wire=m.LINK_WIRE, handler=self._handle, name="engine link")
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
            await asyncio.wait(pumps, timeout=m.CALL_DEADLINE_S)
        self._send_now()

    def request_ids(self) -> list[str]:
        return list(self._pumps)

    async def offer(self, refs: list[KVRef]) -> list[str]:
        """Those that the caller claims; a caller that does not answer claims none."""
        if self._peer is None:
            return []
        try:
            told = await self._peer.call(m.PrefixesOffered(refs=refs), timeout_s=OFFER_DEADLINE_S)
        except BoundaryError:
            return []
        return told.refs if isinstance(told, m.PrefixesClaimed) else []

    async def _handle(self, message: Any) -> m.LinkMessage | None:
        match message:
            case m.Submit(request=request):
                self._submit(request)
            case m.Freeze(request_id=None, keeps_kv=keeps_kv):
                await self._server.freeze_all(keeps_kv=keeps_kv)
            case m.Freeze(request_id=str(request_id), keeps_kv=keeps_kv):
                await self._engine.freeze(request_id, keeps_kv=keeps_kv)
                await self.settle([request_id])
            case m.ImportKV(ref=ref):
                return m.TakenTold(taken=await self._import(ref))
            case m.ReleaseKV(ref=name):
                return m.ReleaseTold(release=await self._engine.release_kv(name))
            case m.Cancel(request_id=request_id):
                await self._engine.cancel(request_id)
                await self.settle([request_id])
            case m.Abandon(request_id=request_id):
                assert self._tasks is not None, "served before run"
                self._tasks.create_task(self._engine.cancel(request_id))
            case m.AskCaps():
                return m.CapsTold(caps=self._engine.caps())
            case _:
                what = f"unexpected {type(message).__name__}"
                raise BoundaryError("engine link", what, retryable=False)
        return None

    async def _import(self, ref: KVRef) -> KVTaken:
        """An engine that is about to leave takes nothing in."""
        if not self._server.is_door_open:
            return KVTaken(ref=ref.ref, num_tokens=0, reason=m.DOOR_IS_CLOSED)
        return await self._engine.import_kv(ref)

    def _submit(self, request: GenerateRequest) -> None:
        assert self._tasks is not None, "served before run"
        request_id = request.request_id
        if not self._server.is_door_open:
            version = self._engine.stats().version
            terminal = Chunk(policy_version=version, finish=Finish.FROZEN, reason=m.DOOR_IS_CLOSED)
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
            self._peer.notify(m.ChunksTold(chunks=chunks))

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
            await asyncio.wait(list(self._connections.values()), timeout=m.CALL_DEADLINE_S)

    def close_door(self) -> None:
        self.is_door_open = False

    def open_door(self) -> None:
        self.is_door_open = True

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        """m.Freeze every request of the engine; each terminal chunk is written on return, and with
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
