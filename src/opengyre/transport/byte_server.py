"""A small threaded TCP server for bulk bytes, and the exact reads of its callers.

Must not know: what the bytes mean. Invariants: one thread for each caller, at most MAX_READERS,
more are refused by closing; every socket wait has a deadline; `close` cuts callers off and leaves
no socket and no thread.
"""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 30.0
CHUNK_BYTES = 2**20
MAX_READERS = 64


class ByteServer:
    """`answer(connection)` serves one caller in its thread; what it raises costs that caller's
    connection only. Raises OSError if it cannot listen."""

    def __init__(
        self, address: tuple[str, int], answer: Callable[[socket.socket], None], *, name: str
    ) -> None:
        self._server = _Server(address, answer)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.02},
            name=name,
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.cut_readers()
        with contextlib.suppress(RuntimeError):  # what could not be started is joined last
            self._server.server_close()
        self._thread.join(timeout=WAIT_S)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], answer: Callable[[socket.socket], None]) -> None:
        super().__init__(address, _Reader)
        self.answer = answer
        self._slots = threading.BoundedSemaphore(MAX_READERS)
        self._lock = threading.Lock()
        self._readers: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._readers.add(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        with self._lock:
            self._readers.discard(request)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away costs only its own connection."""

    def cut_readers(self) -> None:
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            try:
                reader.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class _Reader(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        connection: socket.socket = self.request
        connection.settimeout(WAIT_S)
        server = self.server
        assert isinstance(server, _Server)
        server.answer(connection)


def read_exactly(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`; raises OSError if the other side ends first."""
    position = 0
    while position < len(target):
        num_bytes = connection.recv_into(target[position : position + CHUNK_BYTES])
        if num_bytes == 0:
            raise ConnectionError("the exposer closed the connection")
        position += num_bytes


def read_bytes(connection: socket.socket, num_bytes: int) -> bytes:
    body = bytearray(num_bytes)
    with memoryview(body) as view:
        read_exactly(connection, view)
    return bytes(body)
