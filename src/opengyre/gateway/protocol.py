"""HTTP/1.1 as uvicorn speaks it, with what it leaves to others.

Must not know: the application. Invariants: a connection that does not send a whole head in time is
closed, and so is the longest silent one when there are too many; what one turn of the loop writes
leaves together; the application is told its transport, in the scope's state.
"""

import asyncio
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_NUM_OTHER_FILES = 128
_GRACE_S = 1.0


class _Gathering:
    """A transport whose writes of one turn of the loop leave in one call to the kernel, which
    costs more than making an event does. Everything else is the transport's own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append(data)

    def flush(self) -> None:
        data, self._parts = b"".join(self._parts), []
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()


class TransportProtocol(HttpToolsProtocol):
    """Subclassed for each server, by `protocol_of_a_server`."""

    silent: ClassVar[dict["TransportProtocol", None]] = {}
    max_connections: ClassVar[int] = 0
    head_timeout_s: ClassVar[float] = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        gathering: Any = _Gathering(transport)
        self.app_state = {**self.app_state, "transport": gathering}
        self._head_timer: asyncio.TimerHandle | None = None
        super().connection_made(gathering)
        self._await_head()
        if len(self.connections) > self.max_connections:
            next(iter(self.silent)).transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_awaiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self.silent[self] = None
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._doubt)

    def _doubt(self) -> None:
        """A process that was stopped for long finds its time up before it has read what came."""
        grace_s = min(_GRACE_S, self.head_timeout_s)
        self._head_timer = self.loop.call_later(grace_s, self.transport.abort)

    def _stop_awaiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self.silent.pop(self, None)


def protocol_of_a_server(*, head_timeout_s: float) -> type[TransportProtocol]:
    """With room left for the files that this process opens itself."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    body = {
        "silent": {},
        "max_connections": max(1, num_files - _NUM_OTHER_FILES),
        "head_timeout_s": head_timeout_s,
    }
    return type("TransportProtocol", (TransportProtocol,), body)


def raise_file_limit() -> None:
    """As many open files as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
