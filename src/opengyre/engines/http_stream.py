"""HTTP/1.1 to one server, made for token streams: bytes are handed on as they arrive.

Owns: connections and their reuse, the events of an answer. Must not know: what an event means.
Invariants: a receiver gets exactly one `on_end`, or none after its connection was closed by us; a
connection whose answer was not read to its end is never used again; no event, answer or wait is
unbounded.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from opengyre.seams.errors import BoundaryError, ConfigError

CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 64 * 2**20
MAX_ANSWER_BYTES = 8 * 2**20
MAX_IDLE_CONNECTIONS = 256
MAX_IDLE_S = 3.0
_DATA = b"data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A server: where it listens, the path all requests begin with, a key it may ask for."""

    host: str
    port: int
    is_tls: bool = False
    base_path: str = ""
    api_key: str = field(default="", repr=False)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{self.authority}{self.base_path}"


def parse_origin(url: str, *, api_key: str = "") -> Origin:
    """`http://host:port[/prefix]`; a trailing `/v1` is left out. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url}: not an engine's address ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url}: not an engine's address; expected http://HOST:PORT")
    if parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{url}: an engine's address has no query, fragment or user")
    is_tls = parts.scheme == "https"
    return Origin(
        host=parts.hostname,
        port=port or (443 if is_tls else 80),
        is_tls=is_tls,
        base_path=parts.path.rstrip("/").removesuffix("/v1"),
        api_key=api_key,
    )


class Receiver(Protocol):
    """Who gets an answer. Called on the event loop as bytes arrive; must not block."""

    def on_body(self, status: int, data: bytes) -> None: ...

    def on_end(self, status: int, failure: str) -> None:
        """`failure` is empty when the answer came whole; `status` is 0 when none came."""
        ...


class EventLines:
    """Splits a body into the data of its server-sent events, one line each."""

    __slots__ = ("_partial",)

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises BoundaryError for an event that is too large."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_EVENT_BYTES:
            raise BoundaryError("engine", "an event is too large", retryable=False)
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time. `on_free` tells that it can take another."""

    def __init__(self, on_free: Callable[["HttpConnection"], None]) -> None:
        self._on_free = on_free
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._receiver: Receiver | None = None

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes, receiver: Receiver) -> None:
        assert self._receiver is None, "one request at a time"
        assert self._transport is not None, "sent before it was connected"
        self._receiver = receiver
        self._transport.write(request)

    def close(self) -> None:
        """Cut it; its receiver is told nothing more."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._end(f"not an HTTP answer ({error})")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection broke ({exc})" if exc else "the connection was cut")

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if self._receiver is not None:
            self._receiver.on_body(self._parser.get_status_code(), body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        is_free = self._receiver is not None and self._parser.should_keep_alive()
        self._end("")
        if is_free and not self.is_closed:
            self._on_free(self)
        else:
            self.close()

    def _end(self, failure: str) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_end(self._parser.get_status_code(), failure)


class _Whole:
    """Collects a small answer."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def on_body(self, status: int, data: bytes) -> None:
        if len(self.body) < MAX_ANSWER_BYTES:
            self.body += data

    def on_end(self, status: int, failure: str) -> None:
        if not self.ended.done():
            self.ended.set_result((status, failure))


class HttpPool:
    """Connections to one server. One that was idle for long is not used again: servers close them
    after some seconds. `close` cuts the idle ones."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._idle: list[tuple[float, HttpConnection]] = []
        self._tls = ssl.create_default_context() if origin.is_tls else None
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop()[1].close()

    def free_connection(self) -> HttpConnection | None:
        """One that was used before and can be used again."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            since_s, free = self._idle.pop()
            if not free.is_closed and now_s - since_s < MAX_IDLE_S:
                return free
            free.close()
        return None

    async def connection(self) -> HttpConnection:
        """One that is free, or a new one. Raises BoundaryError if the server is not there."""
        free = self.free_connection()
        if free is not None:
            return free
        origin, loop = self.origin, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await loop.create_connection(
                    lambda: HttpConnection(self._release), origin.host, origin.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            reason = f"{origin} cannot be reached ({_words(error)})"
            raise BoundaryError("engine", reason, retryable=True) from error
        return made

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        origin = self.origin
        lines = [
            f"{method} {origin.base_path}{path} HTTP/1.1",
            f"host: {origin.authority}",
            "accept: */*",
        ]
        if origin.api_key:
            lines.append(f"authorization: Bearer {origin.api_key}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    async def call(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of a small answer. Raises BoundaryError if none comes in time."""
        whole = _Whole()
        connection = await self.connection()
        connection.send(self.request(method, path, body), whole)
        try:
            async with asyncio.timeout(timeout_s):
                status, failure = await whole.ended
        except TimeoutError:
            status, failure = 0, f"no answer in {timeout_s:g} s"
        finally:
            if not whole.ended.done() or whole.ended.cancelled():
                connection.close()
        if failure:
            reason = f"{self.origin}{path}: {failure}"
            raise BoundaryError("engine", reason, retryable=True)
        return status, bytes(whole.body)

    def _release(self, connection: HttpConnection) -> None:
        if self._is_closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.close()
        else:
            self._idle.append((asyncio.get_running_loop().time(), connection))


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
