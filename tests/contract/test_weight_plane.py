"""One suite for every weight plane: what is exposed arrives whole, or a named error is raised."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from plane_rig import KINDS, PlaneMaker

from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Descriptor, WeightPlane


@pytest.fixture(params=KINDS)
def make_plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PlaneMaker]:
    maker = PlaneMaker(request.param, tmp_path)
    yield maker
    maker.close()


def _tensors(seed: int = 0) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    return {
        "a": numbers.standard_normal((3, 5)).astype(np.float32),
        "b.weight": numbers.standard_normal(7),
        "sums": numbers.integers(-(2**62), 2**62, 9),
        "half": numbers.integers(0, 2**16, (2, 3)).astype(np.uint16),
        "big": numbers.standard_normal(700_000).astype(np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }


def _empty_like(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(array) for name, array in tensors.items()}


def test_a_pull_restores_every_bit_and_returns_the_version(make_plane: PlaneMaker) -> None:
    tensors = _tensors()
    descriptor = make_plane().expose(tensors, 7)
    into = _empty_like(tensors)
    assert make_plane().pull(descriptor, into) == 7
    for name, array in tensors.items():
        assert into[name].tobytes() == array.tobytes()


def test_a_part_is_pulled_by_name_in_any_order(make_plane: PlaneMaker) -> None:
    tensors = _tensors()
    descriptor = make_plane().expose(tensors, 7)
    into = {name: np.zeros_like(tensors[name]) for name in ("sums", "empty", "a")}
    assert make_plane().pull(descriptor, into) == 7
    for name, array in into.items():
        assert array.tobytes() == tensors[name].tobytes()
    assert make_plane().pull(descriptor, {}) == 7


def test_a_descriptor_survives_the_wire(make_plane: PlaneMaker) -> None:
    tensors = _tensors()
    descriptor = make_plane().expose(tensors, 1)
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode(descriptor), type=Descriptor)
    assert make_plane().pull(wired, _empty_like(tensors)) == 1
    assert wired == descriptor


def test_bfloat16_is_declared_and_keeps_its_bits(make_plane: PlaneMaker) -> None:
    bits = np.array([0x3F80, 0x7FC0, 0x8000, 0x0001], dtype=np.uint16)
    descriptor = make_plane().expose({"w": bits}, 1)
    assert descriptor.tensors[0].dtype == "bfloat16"
    into = {"w": np.zeros(4, dtype=np.uint16)}
    make_plane().pull(descriptor, into)
    assert into["w"].tolist() == bits.tolist()


def test_the_copy_does_not_follow_later_writes_of_the_source(make_plane: PlaneMaker) -> None:
    source = {"w": np.arange(6.0)}
    descriptor = make_plane().expose(source, 1)
    source["w"][:] = -1
    into = {"w": np.zeros(6)}
    make_plane().pull(descriptor, into)
    assert into["w"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("into", "named"),
    [
        ({"w": np.zeros((3, 2), dtype=np.float32)}, "w"),
        ({"w": np.zeros((2, 3), dtype=np.float64)}, "w"),
        ({"v": np.zeros((2, 3), dtype=np.float32)}, "v"),
        ({"w": np.zeros((2, 3), dtype=np.float32), "v": np.zeros(1)}, "v"),
        ({"w": np.zeros((2, 6), dtype=np.float32)[:, ::2]}, "in place"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_not_touched(
    make_plane: PlaneMaker, into: dict[str, np.ndarray], named: str
) -> None:
    descriptor = make_plane().expose({"w": np.ones((2, 3), dtype=np.float32)}, 1)
    with pytest.raises(BoundaryError, match=named) as caught:
        make_plane().pull(descriptor, into)
    assert not caught.value.retryable
    assert all(not array.any() for array in into.values())


def test_the_last_version_stays_readable_while_the_next_is_exposed(
    make_plane: PlaneMaker,
) -> None:
    plane = make_plane()
    first = plane.expose({"w": np.full(4, 1.0)}, 1)
    second = plane.expose({"w": np.full(4, 2.0)}, 2)
    into = {"w": np.zeros(4)}
    assert make_plane().pull(first, into) == 1
    assert into["w"].tolist() == [1.0] * 4
    assert make_plane().pull(second, into) == 2
    assert into["w"].tolist() == [2.0] * 4


def test_a_replaced_exposure_is_a_clear_retryable_error(make_plane: PlaneMaker) -> None:
    plane = make_plane()
    first = plane.expose({"w": np.full(4, 1.0)}, 1)
    for version in (2, 3):
        plane.expose({"w": np.full(4, float(version))}, version)
    with pytest.raises(BoundaryError, match="weights: gone") as caught:
        make_plane().pull(first, {"w": np.zeros(4)})
    assert caught.value.retryable


def test_a_closed_exposer_is_a_clear_retryable_error(make_plane: PlaneMaker) -> None:
    plane = make_plane()
    descriptor = plane.expose({"w": np.full(4, 1.0)}, 1)
    plane.close()
    plane.close()
    with pytest.raises(BoundaryError, match="weights: gone") as caught:
        make_plane().pull(descriptor, {"w": np.zeros(4)})
    assert caught.value.retryable


def test_a_closed_exposer_exposes_nothing_more(make_plane: PlaneMaker) -> None:
    """Work that was in hand may end after the close; what it left would stay."""
    plane = make_plane()
    plane.expose(_tensors(), 1)
    plane.close()
    with pytest.raises(BoundaryError, match="closed"):
        plane.expose(_tensors(), 2)


def test_a_flipped_byte_is_a_torn_read_of_a_named_tensor(make_plane: PlaneMaker) -> None:
    tensors = _tensors()
    descriptor = make_plane().expose(tensors, 1)
    if descriptor.plane == "shm":
        spec = next(spec for spec in descriptor.tensors if spec.name == "big")
        _flip_in_file(Path(descriptor.address), spec.offset_bytes)
        _expect_torn(make_plane(), descriptor, tensors)
    else:
        with _FlippingProxy(descriptor) as flipped:
            _expect_torn(make_plane(), flipped, tensors)


def test_a_version_that_is_not_the_one_asked_for_is_a_torn_read(make_plane: PlaneMaker) -> None:
    descriptor = make_plane().expose({"w": np.zeros(4)}, 1)
    other = msgspec.structs.replace(descriptor, version=2)
    with pytest.raises(BoundaryError, match="version is 1, not 2"):
        make_plane().pull(other, {"w": np.zeros(4)})


def _expect_torn(
    plane: WeightPlane, descriptor: Descriptor, tensors: dict[str, np.ndarray]
) -> None:
    with pytest.raises(BoundaryError, match="torn read: checksum of 'big'") as caught:
        plane.pull(descriptor, _empty_like(tensors))
    assert caught.value.retryable


def _flip_in_file(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(64 + offset_bytes + 1000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


class _FlippingProxy:
    """Carries one pull to the real exposer and flips one bit on the way back."""

    FLIP_AT_BYTES = 100_000

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self) -> Descriptor:
        self._thread.start()
        _, _, key = self._descriptor.address.partition("/")
        address = f"127.0.0.1:{self._listener.getsockname()[1]}/{key}"
        return msgspec.structs.replace(self._descriptor, address=address)

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        self._listener.close()

    def _carry(self) -> None:
        host, _, port = self._descriptor.address.partition("/")[0].rpartition(":")
        with (
            self._listener.accept()[0] as reader,
            socket.create_connection((host, int(port))) as exposer,
        ):
            exposer.sendall(reader.recv(1024))
            num_seen = 0
            while body := exposer.recv(65536):
                at = self.FLIP_AT_BYTES - num_seen
                if 0 <= at < len(body):
                    body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
                num_seen += len(body)
                try:
                    reader.sendall(body)
                except OSError:
                    return


def test_what_is_exposed_is_counted_until_it_is_withdrawn(make_plane: PlaneMaker) -> None:
    plane, tensors = make_plane(num_newest=1), _tensors()
    one = sum(array.nbytes for array in tensors.values())
    assert plane.exposed_bytes == 0
    for version, num_copies, pinned in ((0, 1, []), (1, 2, [0]), (2, 2, [0]), (3, 1, [])):
        plane.expose(tensors, version, pinned=pinned)
        assert 0 <= plane.exposed_bytes - num_copies * one < 4096, version
    plane.close()
    assert plane.exposed_bytes == 0
