"""Framed messages between our processes: length-prefixed msgpack, one connection per process.

Owns: framing, request/reply matching, back-pressure. Must not know: what a message means.
Invariants: messages are typed tagged Structs; end of file is death (`closed` is set and every
open call fails with BoundaryError); every call has a deadline; at most `MAX_CALLS` handlers run.
"""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from opengyre.seams.errors import BoundaryError, NoAnswer

MAX_FRAME_BYTES = 256 * 2**20
MAX_CALLS = 4096
_NOTIFY, _CALL, _REPLY, _ERROR = range(4)

Handler = Callable[[Any], Awaitable[Any]]


class Wire:
    """Encodes and decodes one closed set of message Structs (each with `tag=True`)."""

    def __init__(self, *types: type[msgspec.Struct]) -> None:
        union: Any = types[0]
        for one in types[1:]:
            union = union | one
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(tuple[int, int, str, union | None])

    def encode(self, kind: int, number: int, text: str, message: msgspec.Struct | None) -> bytes:
        body = self._encoder.encode((kind, number, text, message))
        return len(body).to_bytes(4, "little") + body

    def decode(self, body: bytes) -> tuple[int, int, str, Any]:
        frame: tuple[int, int, str, Any] = self._decoder.decode(body)
        return frame


class Peer:
    """One end of a connection. `run` must be running for calls to be answered.

    The handler takes a message and returns the reply (a message or None); a BoundaryError it
    raises travels to the caller. Notifications are handled in the order they arrive, before the
    next frame is read; calls run concurrently.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        wire: Wire,
        handler: Handler,
        name: str,
    ) -> None:
        self.name = name
        self.closed = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._wire = wire
        self._handler = handler
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._slots = asyncio.Semaphore(MAX_CALLS)

    async def run(self) -> None:
        """Serve until end of file. Never raises for a peer's death."""
        try:
            async with asyncio.TaskGroup() as calls:
                while (frame := await self._read()) is not None:
                    await self._dispatch(frame, calls)
                self._fail_waiting()
                self._writer.transport.abort()  # whoever waits to write to the dead is let go
        finally:
            self._fail_waiting()
            self._writer.close()

    async def call(self, message: msgspec.Struct, *, timeout_s: float) -> Any:
        """Send and await the reply. Raises BoundaryError on death, refusal or time-out."""
        if self.closed.is_set():
            raise BoundaryError(self.name, "connection is closed", retryable=True)
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._write(self._wire.encode(_CALL, number, "", message))
            async with asyncio.timeout(timeout_s):
                await self._drain()
                return await future
        except TimeoutError as error:
            what = f"no answer to {type(message).__name__} in {timeout_s:g} s"
            raise NoAnswer(self.name, what, retryable=True) from error
        finally:
            self._waiting.pop(number, None)

    def notify(self, message: msgspec.Struct) -> None:
        """Send without an answer; dropped when the peer is gone (its death is seen elsewhere)."""
        if not self.closed.is_set():
            self._write(self._wire.encode(_NOTIFY, 0, "", message))

    async def flush(self) -> None:
        """Wait until the peer takes what was written (back-pressure for many notifications)."""
        await self._drain()

    def close(self) -> None:
        self._writer.close()

    async def _read(self) -> bytes | None:
        try:
            head = await self._reader.readexactly(4)
            size = int.from_bytes(head, "little")
            if size > MAX_FRAME_BYTES:
                return None
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _dispatch(self, frame: bytes, calls: asyncio.TaskGroup) -> None:
        kind, number, text, message = self._wire.decode(frame)
        if kind == _NOTIFY:
            await self._handler(message)
        elif kind == _CALL:
            await self._slots.acquire()
            calls.create_task(self._answer(number, message))
        else:
            self._settle(kind, number, text, message)

    def _settle(self, kind: int, number: int, text: str, message: Any) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if kind == _REPLY:
            future.set_result(message)
        else:
            retryable, _, words = text.partition("|")
            future.set_exception(BoundaryError(self.name, words, retryable=retryable == "1"))

    async def _answer(self, number: int, message: Any) -> None:
        try:
            reply = await self._handler(message)
            frame = self._wire.encode(_REPLY, number, "", reply)
        except BoundaryError as error:
            text = f"{int(error.retryable)}|{error}"
            frame = self._wire.encode(_ERROR, number, text, None)
        finally:
            self._slots.release()
        if not self.closed.is_set():
            self._write(frame)
            await self._drain()

    def _write(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except ConnectionError:
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        self.closed.set()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(BoundaryError(self.name, "connection closed", retryable=True))


async def connect(address: str, *, wire: Wire, handler: Handler, name: str) -> Peer:
    """Open a connection to `unix:PATH` or `tcp:HOST:PORT`. Raises BoundaryError if refused."""
    try:
        if address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(address[5:])
        else:
            host, _, port = address.removeprefix("tcp:").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        raise BoundaryError(name, f"cannot connect: {error}", retryable=True) from error
    return Peer(reader, writer, wire=wire, handler=handler, name=name)


async def serve(
    address: str, on_connection: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]
) -> tuple[asyncio.Server, str]:
    """Listen on `unix:PATH` or `tcp:HOST:0`; returns the server and its real address."""
    if address.startswith("unix:"):
        server = await asyncio.start_unix_server(on_connection, address[5:])
        os.chmod(address[5:], 0o600)
        return server, address
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    server = await asyncio.start_server(on_connection, host, int(port))
    bound = server.sockets[0].getsockname()
    return server, f"tcp:{bound[0]}:{bound[1]}"
