"""The weight plane over TCP: a small threaded server in the exposing process.

Owns: its listening socket, its threads, the bytes it exposes. Must not know what the tensors
mean. Invariants: exposed bytes never change; each exposure has its own random key, and a reader
without it gets nothing; every socket wait has a deadline; `close` leaves no socket and no thread.
"""

import hmac
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Mapping
from typing import Any

from opengyre.seams.weights import Descriptor
from opengyre.transport import weights
from opengyre.transport.weights import Array

PLANE = "tcp"
CHUNK_BYTES = 2**20
WAIT_S = 30.0
MAX_READERS = 64
_KEY_BYTES = 32
_VERSION = struct.Struct("<q")


class TcpPlane:
    """Listens from the first `expose` on `host`, at a free port unless `port` names one."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, num_kept: int = 2) -> None:
        self._host = host
        self._port = port
        self._num_kept = num_kept
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def expose(self, tensors: Mapping[str, Array], version: int) -> Descriptor:
        """Copy the tensors; the oldest exposure beyond `num_kept` is withdrawn.

        Raises BoundaryError if the port cannot be opened, or this was closed.
        """
        if self._is_closed:
            raise weights.gone(f"the plane at {self._host} is closed")
        server = self._server or self._open()
        body = bytearray(weights.body_bytes(tensors))
        with memoryview(body) as view:
            specs = weights.lay_out(tensors, view)
        key = secrets.token_hex(_KEY_BYTES // 2)
        server.keep(key, _Exposure(version, bytes(body)), self._num_kept)
        address = f"{self._host}:{server.server_address[1]}/{key}"
        return Descriptor(plane=PLANE, address=address, version=version, tensors=specs)

    def pull(self, descriptor: Descriptor, into: Mapping[str, Array]) -> int:
        """Copy in place; after an error `into` is undefined and must not be used."""
        weights.check_targets(descriptor, into)
        where, _, key = descriptor.address.partition("/")
        host, _, port = where.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(key.encode("ascii"))
                _receive(descriptor, connection, into)
        except (OSError, ValueError) as error:
            raise weights.gone(f"{where}: {error}") from error
        return descriptor.version

    def close(self) -> None:
        """Stop serving, cutting readers off; nothing is exposed any more. Idempotent."""
        self._is_closed = True
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.cut_readers()
        self._server.server_close()
        self._thread.join(timeout=WAIT_S)
        self._server = self._thread = None

    def _open(self) -> "_Server":
        try:
            server = _Server((self._host, self._port), _Reader)
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise weights.no_room(f"cannot listen on {where}: {error}") from error
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="weights-tcp"
        )
        self._thread.start()
        return server


class _Exposure:
    __slots__ = ("body", "version")

    def __init__(self, version: int, body: bytes) -> None:
        self.version = version
        self.body = body


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type["_Reader"]) -> None:
        super().__init__(address, handler)
        self.slots = threading.BoundedSemaphore(MAX_READERS)
        self._lock = threading.Lock()
        self._exposures: dict[str, _Exposure] = {}
        self._readers: set[socket.socket] = set()

    def keep(self, key: str, exposure: _Exposure, num_kept: int) -> None:
        with self._lock:
            self._exposures[key] = exposure
            while len(self._exposures) > num_kept:
                del self._exposures[next(iter(self._exposures))]

    def find(self, key: str) -> _Exposure | None:
        with self._lock:
            for known, exposure in self._exposures.items():
                if hmac.compare_digest(known, key):
                    return exposure
        return None

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread per reader, at most MAX_READERS; more are refused by closing."""
        if not self.slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._readers.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._readers.discard(request)
            self.slots.release()

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
    """Answers a key with version, bytes, version; nothing to a wrong key but "gone"."""

    def handle(self) -> None:
        connection: socket.socket = self.request
        connection.settimeout(WAIT_S)
        server = self.server
        assert isinstance(server, _Server)
        key = _read_bytes(connection, _KEY_BYTES).decode("ascii", "replace")
        exposure = server.find(key)
        if exposure is None:
            connection.sendall(_VERSION.pack(weights.GONE_VERSION))
            return
        connection.sendall(_VERSION.pack(exposure.version))
        with memoryview(exposure.body) as body:
            for start in range(0, len(body), CHUNK_BYTES):
                connection.sendall(body[start : start + CHUNK_BYTES])
        is_kept = server.find(key) is exposure
        connection.sendall(_VERSION.pack(exposure.version if is_kept else weights.GONE_VERSION))


def _receive(descriptor: Descriptor, connection: socket.socket, into: Mapping[str, Array]) -> None:
    weights.check_version(descriptor, _read_version(connection), "before")
    position = 0
    for spec in descriptor.tensors:
        if spec.name not in into:
            continue
        _read_bytes(connection, spec.offset_bytes - position)
        with weights.bytes_of(into[spec.name]) as target:
            _read_exactly(connection, target)
            weights.check_tensor(spec, target)
        position = spec.offset_bytes + spec.num_bytes
    end = max((spec.offset_bytes + spec.num_bytes for spec in descriptor.tensors), default=0)
    _read_bytes(connection, end + -end % weights.ALIGN_BYTES - position)
    weights.check_version(descriptor, _read_version(connection), "after")


def _read_version(connection: socket.socket) -> int:
    (version,) = _VERSION.unpack(_read_bytes(connection, _VERSION.size))
    return int(version)


def _read_exactly(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`; raises OSError if the other side ends first."""
    position = 0
    while position < len(target):
        num_bytes = connection.recv_into(target[position : position + CHUNK_BYTES])
        if num_bytes == 0:
            raise ConnectionError("the exposer closed the connection")
        position += num_bytes


def _read_bytes(connection: socket.socket, num_bytes: int) -> bytes:
    body = bytearray(num_bytes)
    with memoryview(body) as view:
        _read_exactly(connection, view)
    return bytes(body)
