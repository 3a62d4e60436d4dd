"""The weight plane over TCP: a small threaded server in the exposing process.

Owns: the bytes it exposes and the words around them. Must not know what the tensors mean.
Invariants: exposed bytes stand still until they are withdrawn, and no pull ends well after that;
each exposure has its own random key, and a reader without it gets nothing; only the bytes that a
reader asks for travel, each once.

A request is the key, a number of ranges (u32) and these, offset and length (u64 each), ascending
and apart. The answer is the version, the bytes, the version; just "gone" for a wrong key; nothing
to a request that is none.
"""

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Iterator, Mapping

from opengyre.seams.weights import Descriptor, PlaneKind, TensorSpec
from opengyre.transport import weights
from opengyre.transport.byte_server import (
    CHUNK_BYTES,
    WAIT_S,
    ByteServer,
    read_bytes,
    read_exactly,
)
from opengyre.transport.weights import Array

PLANE: PlaneKind = "tcp"
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
        self._exposures = _Exposures()
        self._server: ByteServer | None = None
        self._is_closed = False

    def expose(
        self, tensors: Mapping[str, Array], version: int, *, pinned: Collection[int] = ()
    ) -> Descriptor:
        """Copy the tensors. Raises BoundaryError if there is no memory, the port cannot be opened,
        or this was closed."""
        if self._is_closed:
            raise weights.gone(f"the plane at {self._host} is closed")
        server = self._server or self._open()
        spares = self._exposures.withdraw(num_newest=self._num_newest - 1, pinned=pinned)
        body = _room(weights.body_bytes(tensors), spares)
        with memoryview(body) as view:
            specs = weights.lay_out(tensors, view)
        key = secrets.token_hex(_KEY_BYTES // 2)
        self._exposures.add(key, _Exposure(version, body))
        address = f"{self._host}:{server.port}/{key}"
        return Descriptor(plane=PLANE, address=address, version=version, tensors=specs)

    @property
    def exposed_bytes(self) -> int:
        return 0 if self._server is None else self._exposures.num_bytes()

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
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _open(self) -> ByteServer:
        address = (self._host, self._port)
        try:
            self._server = ByteServer(address, self._exposures.answer, name="weights-tcp")
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise weights.no_room(f"cannot listen on {where}: {error}") from error
        return self._server


class _Exposure:
    __slots__ = ("body", "version")

    def __init__(self, version: int, body: bytearray) -> None:
        self.version = version
        self.body = body


class _Exposures:
    """What is exposed, by key; asked in the server's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, _Exposure] = {}

    def add(self, key: str, exposure: _Exposure) -> None:
        with self._lock:
            self._by_key[key] = exposure

    def withdraw(self, *, num_newest: int, pinned: Collection[int]) -> list[bytearray]:
        """Who reads what goes is cut off at the next chunk. Returns what can be written anew."""
        with self._lock:
            keys = list(self._by_key)
            versions = [one.version for one in self._by_key.values()]
            places = weights.superseded(versions, num_newest=num_newest, pinned=pinned)
            return [self._by_key.pop(keys[place]).body for place in places]

    def num_bytes(self) -> int:
        with self._lock:
            return sum(len(one.body) for one in self._by_key.values())

    def find(self, key: str) -> _Exposure | None:
        with self._lock:
            for known, exposure in self._by_key.items():
                if hmac.compare_digest(known, key):
                    return exposure
        return None

    def answer(self, connection: socket.socket) -> None:
        """One request."""
        key = read_bytes(connection, _KEY_BYTES).decode("ascii", "replace")
        exposure = self.find(key)
        if exposure is None:
            connection.sendall(_VERSION.pack(weights.GONE_VERSION))
            return
        ranges = _read_ranges(connection, len(exposure.body))
        connection.sendall(_VERSION.pack(exposure.version))
        with memoryview(exposure.body) as body:
            for start, end in _chunks(ranges):
                if self.find(key) is None:
                    return
                connection.sendall(body[start:end])
        is_kept = self.find(key) is not None
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
    (num_ranges,) = _NUM_RANGES.unpack(read_bytes(connection, _NUM_RANGES.size))
    if num_ranges > MAX_RANGES:
        raise ValueError(f"{num_ranges} ranges")
    asked = _RANGE.iter_unpack(read_bytes(connection, num_ranges * _RANGE.size))
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
        read_exactly(connection, target)
        weights.check_tensor(spec, target)


def _read_version(connection: socket.socket) -> int:
    (version,) = _VERSION.unpack(read_bytes(connection, _VERSION.size))
    return int(version)
