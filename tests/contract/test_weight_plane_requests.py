"""What a TCP reader may ask for: the bytes it names, each once, and nothing else."""

import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from opengyre.seams.weights import Descriptor
from opengyre.transport.weights_tcp import MAX_RANGES, TcpPlane

BODY_BYTES = 4096
NOTHING = b""


@pytest.fixture
def plane() -> Iterator[TcpPlane]:
    plane = TcpPlane()
    yield plane
    plane.close()


@pytest.fixture
def descriptor(plane: TcpPlane) -> Descriptor:
    return plane.expose({"w": np.arange(BODY_BYTES, dtype=np.uint8)}, 5)


def _answer(descriptor: Descriptor, request: bytes, *, is_cut: bool = False) -> bytes:
    """All that comes back to the key and `request`."""
    where, _, key = descriptor.address.partition("/")
    host, _, port = where.rpartition(":")
    body = bytearray()
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(key.encode() + request)
        if is_cut:
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            body += part
    return bytes(body)


def _request(*ranges: tuple[int, int], num_ranges: int | None = None) -> bytes:
    num = len(ranges) if num_ranges is None else num_ranges
    return struct.pack("<I", num) + b"".join(struct.pack("<QQ", *one) for one in ranges)


def test_only_the_bytes_that_were_asked_for_travel(descriptor: Descriptor) -> None:
    version = struct.pack("<q", 5)
    whole = (np.arange(BODY_BYTES) % 256).astype(np.uint8).tobytes()
    answer = _answer(descriptor, _request((3, 4), (4000, 96)))
    assert answer == version + whole[3:7] + whole[4000:] + version
    assert _answer(descriptor, _request()) == version + version


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, BODY_BYTES + 1)],
        [(BODY_BYTES + 1, 0)],
        [(2**63, 2**63)],
        [(10, 10), (15, 10)],
        [(10, 10), (0, 5)],
        [(0, BODY_BYTES)] * 2,
    ],
)
def test_ranges_outside_or_over_each_other_get_nothing(
    plane: TcpPlane, descriptor: Descriptor, ranges: list[tuple[int, int]]
) -> None:
    assert _answer(descriptor, _request(*ranges)) == NOTHING
    assert plane.pull(descriptor, {"w": np.zeros(BODY_BYTES, dtype=np.uint8)}) == 5


def test_more_ranges_than_may_be_asked_for_get_nothing(descriptor: Descriptor) -> None:
    assert _answer(descriptor, _request(num_ranges=MAX_RANGES + 1)) == NOTHING
    assert _answer(descriptor, _request(num_ranges=2**32 - 1)) == NOTHING


def test_a_request_that_is_cut_off_costs_its_own_connection_only(
    plane: TcpPlane, descriptor: Descriptor
) -> None:
    whole = _request((0, 10), (20, 10))
    for num_bytes in (0, 3, 4, 20, len(whole) - 1):
        assert _answer(descriptor, whole[:num_bytes], is_cut=True) == NOTHING
    assert plane.pull(descriptor, {"w": np.zeros(BODY_BYTES, dtype=np.uint8)}) == 5


def test_a_key_that_is_none_is_told_gone_and_nothing_else(descriptor: Descriptor) -> None:
    address = f"{descriptor.address.partition('/')[0]}/{'0' * 32}"
    stranger = Descriptor(plane="tcp", address=address, version=5, tensors=[])
    assert _answer(stranger, _request((0, 10))) == struct.pack("<q", -1)
