"""Connections in memory for a seeded loop: bytes in order, late, in pieces, cut at will.

Owns: transports and listeners. Must not know: what the bytes mean. Invariants: each direction
keeps its order; what was written before an end arrives before it; an abort or a cut loses what
was on its way; callbacks run as the host that owns the end.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.seeded_loop import HOST, Host, SeededLoop

Delay = Callable[[str], float]
HIGH_WATER_BYTES = 65_536


class _End:
    """The end of a direction: `error` None is an end of file."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class MemoryTransport(asyncio.Transport):
    """One end of a connection. `other` is set once both ends exist."""

    other: "MemoryTransport"

    def __init__(self, net: "Net", name: str, protocol: Any) -> None:
        super().__init__()
        self.name = name
        self.host: Host | None = HOST.get()
        self._net = net
        self._protocol = protocol
        self._context = contextvars.copy_context()
        self._inbox: deque[tuple[float, bytes | _End]] = deque()
        self._last_arrival_s = 0.0
        self._num_unread_bytes = 0
        self._is_paused = False
        self._is_closing = False
        self._is_lost = False
        self._is_sender_paused = False
        self._high_water_bytes = net.high_water_bytes

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return self.other._num_unread_bytes

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._send(_End(None))

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        for _ in self._inbox:
            self._net.loop.call_soon(self._pump, context=self._context)

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        self._net.on_write(self, bytes(data))
        if self._is_closing:
            return
        if self.other._is_closing:
            self._arrive(_End(BrokenPipeError("the other end is closed")))
            return
        for piece in self._net.pieces(bytes(data)):
            self.other._num_unread_bytes += len(piece)
            self._send(piece)
        if self.other._num_unread_bytes > self._high_water_bytes and not self._is_sender_paused:
            self._is_sender_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(_End(None))
            self._lose_soon(None)

    def abort(self) -> None:
        if not self._is_lost:
            self._is_closing = True
            self.other._inbox.clear()
            self._send(_End(ConnectionResetError("reset by the other end")))
            self._lose_soon(None)

    def die(self, *, is_reset: bool) -> None:
        """The host of this end is gone: what it wrote arrives, then the end, which is a reset
        if it had not read everything."""
        if not self._is_closing:
            is_reset = is_reset or bool(self._inbox)
            self._is_closing = self._is_lost = True
            self._inbox.clear()
            self._send(_End(ConnectionResetError("reset by the other end") if is_reset else None))

    def cut(self) -> None:
        """The network between the ends is gone; both notice, each in its time."""
        for end in (self, self.other):
            if not end._is_closing:
                end._inbox.clear()
                end._arrive(_End(ConnectionResetError("the connection was cut")))

    def _send(self, item: bytes | _End) -> None:
        self.other._arrive(item)

    def _arrive(self, item: bytes | _End) -> None:
        loop = self._net.loop
        when_s = max(self._last_arrival_s, loop.time() + self._net.delay_s(self.name))
        self._last_arrival_s = when_s
        self._inbox.append((when_s, item))
        loop.call_at(when_s, self._pump, context=self._context)

    def _pump(self) -> None:
        if self._is_paused or self._is_lost or not self._inbox:
            return
        if self._inbox[0][0] > self._net.loop.time():
            return
        _, item = self._inbox.popleft()
        if isinstance(item, bytes):
            self._num_unread_bytes -= len(item)
            if not self._is_closing:
                self._protocol.data_received(item)
            self.other._ease()
        elif item.error is not None:
            self._is_closing = True
            self._lose_soon(item.error)
        elif not self._is_closing and not self._protocol.eof_received():
            self.close()

    def _ease(self) -> None:
        """What we sent was read: we may write again."""
        if self._is_sender_paused:
            self._net.loop.call_soon(self._resume_sender, context=self._context)

    def _resume_sender(self) -> None:
        is_low = self.other._num_unread_bytes <= self._high_water_bytes // 4
        if self._is_sender_paused and is_low and not self._is_lost:
            self._is_sender_paused = False
            self._protocol.resume_writing()

    def _lose_soon(self, error: Exception | None) -> None:
        self._is_closing = True
        self._net.loop.call_soon(self._lose, error, context=self._context)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(error)


class MemoryServer:
    """A listener; `close` stops accepting, connections live on."""

    def __init__(self, net: "Net", place: str, factory: Callable[[], Any], socket: Any) -> None:
        self.sockets = () if socket is None else (socket,)
        self.host = HOST.get()
        self.factory = factory
        self.context = contextvars.copy_context()
        self._net = net
        self._place = place

    def close(self) -> None:
        self._net.listeners.pop(self._place, None)

    async def wait_closed(self) -> None:
        return


class Net:
    """Every connection of one world. `delay_s(name)` says how long a piece takes."""

    def __init__(self, loop: SeededLoop, *, delay_s: Delay) -> None:
        self.loop = loop
        self.delay_s = delay_s
        self.high_water_bytes = HIGH_WATER_BYTES
        self.split_rate = 0.0
        self.on_write: Callable[[MemoryTransport, bytes], None] = lambda end, data: None
        self.listeners: dict[str, MemoryServer] = {}
        self._backlogs: set[str] = set()
        self._came = asyncio.Event()
        self.ends: list[MemoryTransport] = []

    def listen(self, place: str, factory: Callable[[], Any], socket: Any = None) -> MemoryServer:
        server = MemoryServer(self, place, factory, socket)
        self.listeners[place] = server
        if socket is not None:
            self._backlogs.add(place)
        self._came.set()
        self._came = asyncio.Event()
        return server

    def is_listening(self, place: str) -> bool:
        server = self.listeners.get(place)
        return server is not None and not (server.host is not None and server.host.is_dead)

    async def connect(self, place: str, factory: Callable[[], Any]) -> tuple[Any, Any]:
        """Both ends, or ConnectionRefusedError. At a socket that another process holds too, one
        waits for the next who serves it."""
        await asyncio.sleep(self.delay_s(place))
        while place in self._backlogs and not self.is_listening(place):
            await self._came.wait()
        if not self.is_listening(place):
            raise ConnectionRefusedError(f"nobody listens at {place}")
        server = self.listeners[place]
        protocol = factory()
        near = MemoryTransport(self, place, protocol)
        far = server.context.run(lambda: MemoryTransport(self, place, server.factory()))
        near.other, far.other = far, near
        self.ends += [near, far]
        protocol.connection_made(near)
        far._context.copy().run(far._protocol.connection_made, far)
        return near, protocol

    def pieces(self, data: bytes) -> list[bytes]:
        if len(data) > 1 and self.loop.world.random() < self.split_rate:
            at = 1 + int(self.loop.world.random() * (len(data) - 1))
            return [data[:at], data[at:]]
        return [data]

    def drop_host(self, host: Host) -> None:
        """Its ends die, its listeners too."""
        for end in self.ends:
            if end.host is host:
                end.die(is_reset=self.loop.world.random() < 0.3)
        for place in [k for k, one in self.listeners.items() if one.host is host]:
            del self.listeners[place]
        self.ends = [end for end in self.ends if not end._is_lost]
