"""Pins of a KVMemory over TCP, on loopback.

Owns: the server's words, fetching in a thread. Must not know: layers, tokens. Invariants: a key
gives the bytes of its own pin and no others; the last word says that the pin stood until the last
byte; a reader waits in a thread of its own, never in the caller's.

A request is the key; the answer is a word, the ranges one after another, the word again. GONE
instead of a word: there is no such pin any more.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np

from opengyre.seams.kv import KVPlace
from opengyre.transport import weights
from opengyre.transport.byte_server import CHUNK_BYTES, WAIT_S, ByteServer, read_bytes, read_exactly
from opengyre.transport.kv import Bytes, gone
from opengyre.transport.kv_memory import KVMemory

KIND = "tcp"
_HOST = "127.0.0.1"
_KEY_BYTES = 32
_STANDS = b"PIN "
_GONE = b"GONE"


class KVServer:
    """Listens from the first pin on, at a free port of loopback."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._server: ByteServer | None = None
        self._pins: dict[str, list[tuple[int, int]]] = {}

    def pin(self, slot: int, ranges: Sequence[tuple[int, int]]) -> KVPlace:
        """See KVMemory. Raises BoundaryError if it cannot listen."""
        server = self._server or self._open()
        place = self._memory.pin(slot, ranges)
        self._pins[place.key] = list(ranges)
        return KVPlace(
            kind=KIND,
            address=f"{_HOST}:{server.port}",
            key=place.key,
            num_ranges=place.num_ranges,
            range_bytes=place.range_bytes,
        )

    def unpin(self, key: str) -> None:
        """From its return on no reading of it ends well. Idempotent."""
        self._pins.pop(key, None)
        self._memory.unpin(key)

    def close(self) -> None:
        """Cut readers off; no socket and no thread is left. Idempotent."""
        self._pins.clear()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _open(self) -> ByteServer:
        try:
            self._server = ByteServer((_HOST, 0), self._answer, name="kv-tcp")
        except OSError as error:
            raise gone(f"cannot listen on {_HOST}: {error}") from error
        return self._server

    def _answer(self, connection: socket.socket) -> None:
        key = read_bytes(connection, _KEY_BYTES).decode("ascii", "replace")
        ranges, view = self._pins.get(key), self._memory.view
        if ranges is None or view is None:
            connection.sendall(_GONE)
            return
        connection.sendall(_STANDS)
        with weights.bytes_of(view) as body:
            for start, end in _chunks(ranges):
                if key not in self._pins:
                    return
                connection.sendall(body[start:end])
        connection.sendall(_STANDS if key in self._pins else _GONE)


class TcpReading:
    """Fetches everything into a buffer of its own from the start on."""

    def __init__(self, place: KVPlace) -> None:
        """Raises BoundaryError for a place that is none."""
        host, _, port = place.address.rpartition(":")
        is_key = len(place.key) == _KEY_BYTES and place.key.isalnum() and place.key.isascii()
        if not is_key or not host or not port.isdecimal():
            raise gone("its address is none of a server")
        self._place = place
        self._address = (host, int(port))
        try:
            self._buffer: Bytes | None = np.empty(place.num_bytes, np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:
            raise gone(f"there is no room for {place.num_bytes} bytes") from error
        self._failure = ""
        self._connection: socket.socket | None = None
        self._is_closed = False
        self._on_done: Callable[[], object] = lambda: None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="kv-read", daemon=True)
        self._thread.start()

    def is_here(self) -> bool:
        return self._done.is_set()

    async def wait_here(self) -> None:
        """For one waiter; it may be cancelled."""
        here, loop = asyncio.Event(), asyncio.get_running_loop()
        self._on_done = lambda: loop.call_soon_threadsafe(here.set)
        if not self._done.is_set():
            async with asyncio.timeout(WAIT_S):
                await here.wait()
        self.check()

    def copy(self, number: int, into: Bytes) -> None:
        self.check()
        size, buffer = self._place.range_bytes, self._buffer
        if buffer is None:
            raise gone("the reading is closed")
        np.copyto(into, buffer[number * size : (number + 1) * size])

    def check(self) -> None:
        """The server's last word stands for all bytes: they are in our own buffer."""
        if self._failure or not self._done.is_set():
            raise gone(self._failure or f"not here after {WAIT_S:g} s")

    def close(self) -> None:
        self._is_closed = True
        self._buffer = None
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _fetch(self) -> None:
        try:
            with socket.create_connection(self._address, timeout=WAIT_S) as connection:
                self._connection = connection
                self._receive(connection)
        except (OSError, OverflowError, ValueError) as error:
            where = ":".join(map(str, self._address))
            self._failure = f"{where}: {error}"
        self._done.set()
        with contextlib.suppress(RuntimeError):  # the loop of who waited is closed
            self._on_done()

    def _receive(self, connection: socket.socket) -> None:
        buffer = self._buffer
        if self._is_closed or buffer is None:
            raise ConnectionError("the reading is closed")
        connection.sendall(self._place.key.encode("ascii"))
        self._check_word(connection)
        with weights.bytes_of(buffer) as body:
            read_exactly(connection, body)
        self._check_word(connection)

    @staticmethod
    def _check_word(connection: socket.socket) -> None:
        if read_bytes(connection, len(_STANDS)) != _STANDS:
            raise ConnectionError("its lease is over")


def _chunks(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """[start, end) of what is sent at once."""
    return [
        (at, min(at + CHUNK_BYTES, start + num_bytes))
        for start, num_bytes in ranges
        for at in range(start, start + num_bytes, CHUNK_BYTES)
    ]
