"""The weight plane over TCP: a small threaded server in the exposing process.

Owns: its listening socket, its threads, the bytes it exposes. Must not know what the tensors
mean. Invariants: exposed bytes stand still until they are withdrawn, and no pull ends well after
that; each exposure has its own random key, and a reader without it gets nothing; only the bytes
that a reader asks for travel, each once; every socket wait has a deadline; `close` leaves no socket
and no thread.

A request is the key, a number of ranges (u32) and these, offset and length (u64 each), ascending
and apart. The answer is the version, the bytes, the version; just "gone" for a wrong key; nothing
to a request that is none.
"""

import hmac
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from opengyre.seams.weights import Descriptor, PlaneKind, TensorSpec
from opengyre.transport import weights
from opengyre.transport.weights import Array

PLANE: PlaneKind = "tcp"
CHUNK_BYTES = 2**20
WAIT_S = 30.0
MAX_READERS = 64
MAX_RANGES = 2**16
_KEY_BYTES = 32
_VERSION = struct.Struct("<q")
_NUM_RANGES = struct.Struct("<I")
_RANGE = struct.Struct("<QQ")


class TcpPlane:
    """Listens from the first `expose` on `host`, at a free port unless `port` names one. The
    `num_newest` newest exposures stay readable beside the pinned ones."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, num_newest: int = 2) -> None:
        self._host = host
        self._port = port
        self._num_newest = num_newest
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def expose(
        self, tensors: Mapping[str, Array], version: int, *, pinned: Collection[int] = ()
    ) -> Descriptor:
        """Copy the tensors. Raises BoundaryError if there is no memory, the port cannot be opened,
        or this was closed."""
        if self._is_closed:
            raise weights.gone(f"the plane at {self._host} is closed")
        server = self._server or self._open()
        spares = server.withdraw(num_newest=self._num_newest - 1, pinned=pinned)
        body = _room(weights.body_bytes(tensors), spares)
        with memoryview(body) as view:
            specs = weights.lay_out(tensors, view)
        key = secrets.token_hex(_KEY_BYTES // 2)
        server.add(key, _Exposure(version, body))
        address = f"{self._host}:{server.server_address[1]}/{key}"
        return Descriptor(plane=PLANE, address=address, version=version, tensors=specs)

    @property
    def exposed_bytes(self) -> int:
        return 0 if self._server is None else self._server.num_bytes()

    def pull(self, descriptor: Descriptor, into: Mapping[str, Array]) -> int:
        """Copy in place; after an error `into` is undefined and must not be used."""
        specs = weights.wanted(descriptor, into, plane=PLANE)
        where, _, key = descriptor.address.partition("/")
        host, _, port = where.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(key.encode("ascii") + _request(specs))
                weights.check_version(descriptor, _read_version(connection), "before")
                for spec in specs:
                    _receive(spec, connection, into[spec.name])
                weights.check_version(descriptor, _read_version(connection), "after")
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

    def __init__(self, version: int, body: bytearray) -> None:
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

    def add(self, key: str, exposure: _Exposure) -> None:
        with self._lock:
            self._exposures[key] = exposure

    def withdraw(self, *, num_newest: int, pinned: Collection[int]) -> list[bytearray]:
        """Who reads what goes is cut off at the next chunk. Returns what can be written anew."""
        with self._lock:
            keys = list(self._exposures)
            versions = [one.version for one in self._exposures.values()]
            places = weights.superseded(versions, num_newest=num_newest, pinned=pinned)
            return [self._exposures.pop(keys[place]).body for place in places]

    def num_bytes(self) -> int:
        with self._lock:
            return sum(len(one.body) for one in self._exposures.values())

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
    """Answers one request."""

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
        ranges = _read_ranges(connection, len(exposure.body))
        connection.sendall(_VERSION.pack(exposure.version))
        with memoryview(exposure.body) as body:
            for start, end in _chunks(ranges):
                if server.find(key) is None:
                    return
                connection.sendall(body[start:end])
        is_kept = server.find(key) is not None
        connection.sendall(_VERSION.pack(exposure.version if is_kept else weights.GONE_VERSION))


def _room(num_bytes: int, spares: list[bytearray]) -> bytearray:
    """A spare of that size: writing to memory that is there takes a third of the time."""
    fitting = [spare for spare in spares if len(spare) == num_bytes]
    spares.clear()
    try:
        return fitting[0] if fitting else bytearray(num_bytes)
    except (MemoryError, OverflowError) as error:
        raise weights.no_room(f"cannot hold {num_bytes} bytes: {error!r}") from error


def _request(specs: list[TensorSpec]) -> bytes:
    """What is asked for after the key."""
    return _NUM_RANGES.pack(len(specs)) + b"".join(
        _RANGE.pack(spec.offset_bytes, spec.num_bytes) for spec in specs
    )


def _read_ranges(connection: socket.socket, body_bytes: int) -> list[tuple[int, int]]:
    """[start, end) of each. Raises ValueError for a request that is none: nobody gets more than
    each byte once."""
    (num_ranges,) = _NUM_RANGES.unpack(_read_bytes(connection, _NUM_RANGES.size))
    if num_ranges > MAX_RANGES:
        raise ValueError(f"{num_ranges} ranges")
    asked = _RANGE.iter_unpack(_read_bytes(connection, num_ranges * _RANGE.size))
    ranges = [(start, start + num_bytes) for start, num_bytes in asked]
    position = 0
    for start, end in ranges:
        if not position <= start <= end <= body_bytes:
            raise ValueError(f"range [{start}, {end}) of {body_bytes} bytes")
        position = end
    return ranges


def _chunks(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, end in ranges:
        for at in range(start, end, CHUNK_BYTES):
            yield at, min(at + CHUNK_BYTES, end)


def _receive(spec: TensorSpec, connection: socket.socket, into: Array) -> None:
    with weights.bytes_of(into) as target:
        _read_exactly(connection, target)
        weights.check_tensor(spec, target)


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
