"""Pulls that something happens to, over both planes: whole, or a clear error to try again on."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from plane_rig import (
    DEADLINE_S,
    KINDS,
    Interrupted,
    PlaneMaker,
    exposer,
    targets_of,
    tensors_of,
)

from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import WeightPlane

# Much more than the buffers of a socket hold.
NUM_FLOATS = 8_000_000
ENDINGS: dict[str, Callable[[WeightPlane], object]] = {
    "replaced": lambda plane: [plane.expose({"w": np.zeros(3)}, version) for version in (2, 3)],
    "written over": lambda plane: [plane.expose(_others(), version) for version in (2, 3)],
    "written over under its version": lambda plane: [plane.expose(_others(), 1) for _ in range(2)],
    "closed": lambda plane: plane.close(),
}


def _others() -> dict[str, np.ndarray]:
    """As large as what is pulled."""
    return {name: one + 1 for name, one in tensors_of(NUM_FLOATS).items()}


@pytest.fixture(params=KINDS)
def make_plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PlaneMaker]:
    maker = PlaneMaker(request.param, tmp_path)
    yield maker
    maker.close()


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_withdrawn_during_a_pull_is_a_clear_error_that_may_be_retried(
    make_plane: PlaneMaker, ending: str
) -> None:
    plane = make_plane()
    descriptor = plane.expose(tensors_of(NUM_FLOATS), 1)
    into = Interrupted(targets_of(NUM_FLOATS), at="middle", act=lambda: ENDINGS[ending](plane))
    with pytest.raises(BoundaryError, match=r"weights: (gone|torn)") as caught:
        make_plane().pull(descriptor, into)
    assert caught.value.retryable


def test_an_exposer_that_is_killed_during_a_pull_costs_an_error_or_nothing(
    make_plane: PlaneMaker,
) -> None:
    """A file outlives its writer, a connection does not."""
    arrays = targets_of(NUM_FLOATS)
    with exposer(make_plane.kind, make_plane.folder, NUM_FLOATS) as (process, descriptor):

        def kill() -> None:
            process.kill()
            process.wait(DEADLINE_S)

        into = Interrupted(arrays, at="middle", act=kill)
        if make_plane.kind == "tcp":
            with pytest.raises(BoundaryError, match="weights: gone") as caught:
                make_plane().pull(descriptor, into)
            assert caught.value.retryable
        else:
            assert make_plane().pull(descriptor, into) == 1
            assert arrays["last"].tolist() == tensors_of(NUM_FLOATS)["last"].tolist()
        assert process.returncode == -9
    for left in make_plane.folder.iterdir():
        left.unlink()


def test_the_next_exposure_waits_for_no_reader_of_the_last_one(make_plane: PlaneMaker) -> None:
    """Three engines are in the middle of a publication when the next version is exposed."""
    plane, tensors = make_plane(), tensors_of(NUM_FLOATS)
    published = plane.expose(tensors, 1)
    may_go_on, all_inside = threading.Event(), threading.Barrier(4, timeout=DEADLINE_S)

    def stand_still() -> None:
        all_inside.wait()
        assert may_go_on.wait(DEADLINE_S)

    def read() -> int:
        targets = targets_of(NUM_FLOATS)
        version = make_plane().pull(published, Interrupted(targets, at="middle", act=stand_still))
        assert all(targets[name].tobytes() == tensors[name].tobytes() for name in tensors)
        return version

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        all_inside.wait()
        newer = [
            plane.expose({"w": np.full(3, version)}, version, pinned=[1]) for version in (2, 3)
        ]
        into = {"w": np.zeros(3, dtype=np.int64)}
        assert make_plane().pull(newer[-1], into) == 3
        assert not any(reader.done() for reader in readers)
        may_go_on.set()
        assert [reader.result(DEADLINE_S) for reader in readers] == [1, 1, 1]


def test_a_pinned_version_outlives_any_number_of_newer_ones(make_plane: PlaneMaker) -> None:
    plane = make_plane(num_newest=1)
    published = plane.expose({"w": np.full(4, 1.0)}, 1)
    between = [plane.expose({"w": np.zeros(4)}, version, pinned=[1]) for version in range(2, 7)]
    into = {"w": np.zeros(4)}
    assert make_plane().pull(published, into) == 1
    assert into["w"].tolist() == [1.0] * 4
    assert make_plane().pull(between[-1], into) == 6
    for older in between[:-1]:
        with pytest.raises(BoundaryError, match="weights: gone"):
            make_plane().pull(older, into)
    plane.expose({"w": np.zeros(4)}, 7, pinned=[6])
    with pytest.raises(BoundaryError, match="weights: gone"):
        make_plane().pull(published, into)
    assert make_plane().pull(between[-1], into) == 6


def test_what_there_is_no_room_for_is_a_clear_error_and_costs_nothing_that_is_pinned(
    make_plane: PlaneMaker,
) -> None:
    plane = make_plane(num_newest=1)
    descriptor = plane.expose({"w": np.full(4, 1.0)}, 1)
    petabytes = np.broadcast_to(np.zeros(1), (2**50,))
    with pytest.raises(BoundaryError, match="weights: cannot") as caught:
        plane.expose({"w": petabytes}, 2, pinned=[1])
    assert not caught.value.retryable
    assert make_plane().pull(descriptor, {"w": np.zeros(4)}) == 1
    plane.expose({"w": np.full(4, 3.0)}, 3)


def test_a_descriptor_of_the_other_plane_is_refused(make_plane: PlaneMaker, tmp_path: Path) -> None:
    other = PlaneMaker(next(kind for kind in KINDS if kind != make_plane.kind), tmp_path)
    descriptor = other().expose({"w": np.zeros(4)}, 1)
    with pytest.raises(BoundaryError, match="exposed by") as caught:
        make_plane().pull(descriptor, {"w": np.zeros(4)})
    assert not caught.value.retryable
    other.close()
