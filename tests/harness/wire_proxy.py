"""A proxy between a harness and the gateway: counts what the harness asks, and misbehaves once.

It speaks plain HTTP/1.1 with a content length on requests, one upstream connection per request.
What it does to the first matching call is a Fault; all else passes untouched.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import h11

READ_BYTES = 1 << 16
BLOCK_END = (
    b"event: content_block_stop",
    b"event: response.output_item.done",
    b'"tool_calls":[',
)
BEGUN_BYTES = 600
SETTLE_S = 0.1
"""The program has then read what it was given."""
UNSTREAMED_CUT_S = 0.15
"""Answers must take longer than this, so that one which is not streamed can be cut."""


class Fault(StrEnum):
    """HARNESSES.md section 2, in its order."""

    SILENCE_BEFORE_HEADERS = "silence before headers"
    SILENCE_AFTER_HEADERS = "silence after headers"
    COMMENTS = "comments"
    ONE_WRITE = "whole answer in one write"
    UNAVAILABLE_ONCE = "503 once"
    UNAVAILABLE_FOR_EVER = "503 for ever"
    TOO_MANY = "429 with retry-after"
    DROP_EARLY = "drop, no block complete"
    DROP_LATE = "drop after a complete block"
    CLEAN_END = "clean end without the terminal event"
    ERROR_EVENT = "error event in the stream"
    BAD_REQUEST = "400"


CUTS = frozenset({Fault.DROP_EARLY, Fault.DROP_LATE, Fault.CLEAN_END, Fault.ERROR_EVENT})


@dataclass(slots=True)
class Seen:
    """One request as the harness sent it; `status` is what it got."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    fault: Fault | None = None
    status: int = 0
    answer: bytes = b""

    @property
    def is_model_call(self) -> bool:
        return self.path.partition("?")[0].rsplit("/", 1)[-1] in (
            "completions",
            "messages",
            "responses",
        )


@dataclass
class WireProxy:
    """`is_struck(call)` chooses the calls that get `fault`, at most `num_strikes` of them."""

    upstream: str
    fault: Fault | None = None
    num_strikes: int | None = 1
    silence_s: float = 3.0
    is_struck: Callable[[Seen], bool] = field(default=lambda seen: seen.is_model_call)
    seen: list[Seen] = field(default_factory=list)

    @property
    def calls(self) -> list[Seen]:
        return [one for one in self.seen if one.is_model_call]

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The address to give to the harness."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Side(reader, writer, h11.Connection(h11.SERVER))
        try:
            while await self._one_request(client):
                client.wire.start_next_cycle()
        except (h11.ProtocolError, ConnectionError, _Cut):
            writer.transport.abort()
        finally:
            writer.close()

    async def _one_request(self, client: "_Side") -> bool:
        """True if the connection goes on."""
        head = await client.event()
        if not isinstance(head, h11.Request):
            return False
        body = await client.body()
        headers = {name.decode().lower(): value.decode() for name, value in head.headers}
        seen = Seen(
            path=head.target.decode(),
            headers=headers,
            body=json.loads(body) if body[:1] == b"{" else {},
        )
        self.seen.append(seen)
        if self.fault is not None and self.num_strikes != 0 and self.is_struck(seen):
            seen.fault = self.fault
            self.num_strikes = None if self.num_strikes is None else self.num_strikes - 1
        if not await self._refused(client, seen):
            await self._forward(client, head, body, seen)
        return client.wire.our_state is h11.DONE and client.wire.their_state is h11.DONE

    async def _refused(self, client: "_Side", seen: Seen) -> bool:
        status = {
            Fault.UNAVAILABLE_ONCE: 503,
            Fault.UNAVAILABLE_FOR_EVER: 503,
            Fault.TOO_MANY: 429,
            Fault.BAD_REQUEST: 400,
        }.get(seen.fault)  # type: ignore[arg-type]
        if status is None:
            return False
        seen.status = status
        kind = "invalid_request_error" if status == 400 else "overloaded_error"
        error = {"type": kind, "message": "struck", "code": None, "param": None}
        answer = json.dumps({"type": "error", "error": error}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(answer)))]
        if status == 429:
            headers.append(("retry-after", "1"))
        await client.send(h11.Response(status_code=status, headers=headers))
        await client.send(h11.Data(data=answer))
        await client.send(h11.EndOfMessage())
        return True

    async def _forward(self, client: "_Side", head: h11.Request, body: bytes, seen: Seen) -> None:
        url = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        server = _Side(reader, writer, h11.Connection(h11.CLIENT))
        try:
            await server.send(head)
            if body:
                await server.send(h11.Data(data=body))
            await server.send(h11.EndOfMessage())
            if seen.fault in CUTS and not seen.body.get("stream"):
                await asyncio.sleep(UNSTREAMED_CUT_S)
                raise _Cut
            await self._answer(client, server, seen)
        finally:
            writer.transport.abort()

    async def _answer(self, client: "_Side", server: "_Side", seen: Seen) -> None:
        fault = seen.fault
        if fault is Fault.SILENCE_BEFORE_HEADERS:
            await asyncio.sleep(self.silence_s)
        head = await server.event()
        assert isinstance(head, h11.Response), head
        seen.status = head.status_code
        await client.send(head)
        if fault is Fault.SILENCE_AFTER_HEADERS:
            await asyncio.sleep(self.silence_s)
        if fault is Fault.COMMENTS and _is_stream(head):
            for _ in range(int(self.silence_s)):
                await client.send(h11.Data(data=b": still here\n\n"))
                await asyncio.sleep(1)
        await self._stream(client, server, seen)

    async def _stream(self, client: "_Side", server: "_Side", seen: Seen) -> None:
        kept = b""
        while isinstance(event := await server.event(), h11.Data):
            data = bytes(event.data)
            seen.answer += data
            if seen.fault is Fault.ONE_WRITE:
                kept += data
                continue
            if await self._cut_early(client, seen):
                return
            await client.send(h11.Data(data=data))
            if await self._cut_late(client, seen):
                return
        if kept:
            await client.send(h11.Data(data=kept))
        await client.send(h11.EndOfMessage())

    async def _cut_early(self, client: "_Side", seen: Seen) -> bool:
        """Whether the answer ends here, with hardly more than its opening events."""
        if len(seen.answer) <= BEGUN_BYTES:
            return False
        if seen.fault is Fault.DROP_EARLY:
            raise _Cut
        if seen.fault is Fault.ERROR_EVENT:
            await client.send(h11.Data(data=_error_event(seen)))
            await client.send(h11.EndOfMessage())
            return True
        return False

    async def _cut_late(self, client: "_Side", seen: Seen) -> bool:
        """Whether the answer ends here, with its text complete; the first block is thought."""
        num_blocks = sum(seen.answer.count(mark) for mark in BLOCK_END)
        is_late = num_blocks >= (1 if b"chat.completion" in seen.answer else 2)
        if not is_late or seen.fault not in (Fault.DROP_LATE, Fault.CLEAN_END):
            return False
        await asyncio.sleep(SETTLE_S)
        if seen.fault is Fault.DROP_LATE:
            raise _Cut
        await client.send(h11.EndOfMessage())
        return True


class _Cut(Exception):
    """The connection is reset here."""


class _Side:
    """One end of the proxy: events in and out."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: h11.Connection
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.wire = wire

    async def event(self) -> Any:
        while (event := self.wire.next_event()) is h11.NEED_DATA:
            if self.wire.they_are_waiting_for_100_continue:
                raise ConnectionError("100-continue is not spoken here")
            self.wire.receive_data(await self._reader.read(READ_BYTES))
        return event

    async def body(self) -> bytes:
        parts = []
        while isinstance(event := await self.event(), h11.Data):
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def send(self, event: Any) -> None:
        if (data := self.wire.send(event)) is not None:
            self._writer.write(data)
            await self._writer.drain()


def _is_stream(head: h11.Response) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.headers
    )


def _error_event(seen: Seen) -> bytes:
    """An error inside a stream, in the protocol's own words."""
    kind = seen.path.partition("?")[0].rsplit("/", 1)[-1]
    error = {"type": "overloaded_error", "message": "struck", "code": "server_is_overloaded"}
    if kind == "messages":
        return (
            b"event: error\ndata: "
            + json.dumps({"type": "error", "error": error}).encode()
            + b"\n\n"
        )
    if kind == "responses":
        failed = {
            "type": "response.failed",
            "sequence_number": 99,
            "response": {"id": "resp_x", "object": "response", "status": "failed", "error": error},
        }
        return b"event: response.failed\ndata: " + json.dumps(failed).encode() + b"\n\n"
    limited = {"type": "rate_limit_error", "message": "struck", "code": "429"}
    return b"data: " + json.dumps({"error": limited}).encode() + b"\n\n"
