"""One client's HTTP exchange as bytes: read the body, write, know that it left, abort it.

Owns: the ASGI calls. Must not know: dialects, turns. Invariants: `is_gone` is true as soon as the
transport closes, before anyone was told; an answer that was begun and not ended ends in a TCP
reset, never an end of file, also when this process is killed: some clients take the latter for the
end of the answer.
"""

import asyncio
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from opengyre.gateway.body import MAX_BODY_BYTES
from opengyre.gateway.request import Refusal

BODY_TIMEOUT_S = 60.0
BODY_SILENCE_S = 10.0
_MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_ORDERLY_CLOSE = struct.pack("ii", 0, 0)


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete."""


class Connection:
    """One request on one connection. Reading the body comes first, then one answer.

    `written_s`: when something was last written, on the loop's clock; 0 before.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._transport: asyncio.Transport = scope["state"]["transport"]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.has_begun = False
        self.written_s = 0.0

    @property
    def is_gone(self) -> bool:
        return self._transport.is_closing()

    def header(self, name: str) -> str:
        return self._headers.get(name.encode(), b"").decode("latin-1")

    @property
    def num_body_bytes(self) -> int:
        """What the client says that it will send; the most there can be if it does not."""
        told = self.header("content-length")
        return min(int(told), MAX_BODY_BYTES) if told.isdecimal() else MAX_BODY_BYTES

    async def read_body(self) -> bytes:
        """Raises Refusal for a body that is too large or too slow, ClientLeft if it is cut."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_parts()
        except TimeoutError as error:
            what = (
                f"nothing of the body in {BODY_SILENCE_S:g} s, or not all in {BODY_TIMEOUT_S:g} s"
            )
            raise Refusal(what, status=408) from error

    async def watch(self) -> None:
        """Raises ClientLeft when the client goes before the answer is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientLeft

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers; the body follows with `write` and `end`."""
        self.has_begun = True
        self._linger(_RESET_ON_CLOSE)
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes) -> None:
        """Nothing is awaited after the bytes went to the transport."""
        self.written_s = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self._linger(_ORDERLY_CLOSE)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        """Reset the connection: what was not sent is dropped."""
        if self._transport.is_closing():
            return
        self._linger(_RESET_ON_CLOSE)
        self._transport.abort()

    async def reset(self) -> None:
        """`abort`, and wait until the server noticed."""
        self.abort()
        await self.gone()

    async def gone(self) -> None:
        """Return when the server knows too that the client is gone; else it blames the app."""
        with suppress(ClientLeft):
            await self.watch()

    def _linger(self, how: bytes) -> None:
        """What the kernel does with this connection when it is closed, by us or by our death."""
        sock: Any = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)

    async def _read_parts(self) -> bytes:
        """What is too large is read on and dropped: a client that still writes sees no answer."""
        parts: list[bytes] = []
        size = 0
        while True:
            async with asyncio.timeout(BODY_SILENCE_S):
                message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size <= MAX_BODY_BYTES:
                parts.append(part)
            is_last = not message.get("more_body", False)
            if is_last and size <= MAX_BODY_BYTES:
                return b"".join(parts)
            if is_last or size > _MAX_DISCARDED_BYTES:
                raise Refusal(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413)
