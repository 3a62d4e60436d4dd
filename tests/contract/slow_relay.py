"""A TCP relay between a reader of a pinned prefix and its source, which a test holds and cuts."""

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from opengyre.seams.kv import KVRef

PIECE_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class Relay:
    """Lets `pass_bytes` through to the reader, then holds what follows until `let_go`."""

    upstream: tuple[str, int]
    pass_bytes: int
    num_passed_bytes: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)
    going: asyncio.Event = field(default_factory=asyncio.Event)
    reader_gone: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    address: str = ""

    def let_go(self) -> None:
        self.going.set()

    async def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.going.set()
        await asyncio.sleep(0)

    async def on_reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.upstream)
        except OSError:
            writer.transport.abort()
            return
        self.writers += [writer, far_writer]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pipe_asked(reader, far_writer))
                group.create_task(self._pipe_held(far_reader, writer))
        finally:
            for one in (writer, far_writer):
                one.transport.abort()

    async def _pipe_asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the reader hangs up."""
        try:
            while piece := await reader.read(PIECE_BYTES):
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, OSError):
            writer.transport.abort()
        self.reader_gone.set()

    async def _pipe_held(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(PIECE_BYTES):
                left = self.pass_bytes - self.num_passed_bytes
                if len(piece) > left and not self.going.is_set():
                    writer.write(piece[: max(left, 0)])
                    piece = piece[max(left, 0) :]
                    self.held.set()
                    await self.going.wait()
                self.num_passed_bytes += len(piece)
                writer.write(piece)
                await writer.drain()
            writer.close()
        except (ConnectionError, OSError):
            writer.close()


@asynccontextmanager
async def relay_of(ref: KVRef, *, pass_bytes: int) -> Any:
    """A relay and `ref` as it is read through it."""
    match = re.search(r"([\d.]+):(\d+)$", ref.place.address)
    assert match is not None, ref.place.address
    relay = Relay(upstream=(match[1], int(match[2])), pass_bytes=pass_bytes)
    tasks: set[asyncio.Task[None]] = set()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(relay.on_reader(reader, writer)))

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    relay.address = ref.place.address[: match.start()] + f"{host}:{port}"
    place = msgspec.structs.replace(ref.place, address=relay.address)
    try:
        yield relay, msgspec.structs.replace(ref, place=place)
    finally:
        server.close()
        await relay.cut()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
