"""Snapshots in parts, over both planes: what is pulled by name, from whichever part holds it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from plane_rig import KINDS, PlaneMaker

from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Snapshot, WeightPlane
from opengyre.transport.snapshots import pull_named


@pytest.fixture(params=KINDS)
def make_plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PlaneMaker]:
    maker = PlaneMaker(request.param, tmp_path)
    yield maker
    maker.close()


@pytest.fixture
def planes(make_plane: PlaneMaker) -> list[WeightPlane]:
    return [make_plane() for _ in range(2)]


def _two_parts(planes: list[WeightPlane], *, versions: tuple[int, int] = (4, 4)) -> Snapshot:
    """`embed` is tied: both ends hold it."""
    first = {"embed": np.arange(5.0), "low": np.full((2, 3), 1.5, dtype=np.float32)}
    last = {"high": np.arange(7.0), "embed": np.arange(5.0)}
    parts = [
        plane.expose(part, version)
        for plane, part, version in zip(planes, (first, last), versions, strict=True)
    ]
    return Snapshot(version=4, parts=parts)


def test_any_names_are_pulled_from_the_parts_that_hold_them(planes: list[WeightPlane]) -> None:
    snapshot = _two_parts(planes)
    into = {"high": np.zeros(7), "embed": np.zeros(5)}
    assert pull_named(planes[0], snapshot, into) == 4
    assert into["high"].tolist() == list(range(7))
    assert into["embed"].tolist() == list(range(5))


def test_a_tied_tensor_is_counted_once(planes: list[WeightPlane]) -> None:
    snapshot = _two_parts(planes)
    assert [spec.name for spec in snapshot.tensors] == ["embed", "low", "high"]
    whole = {
        "embed": np.arange(5.0),
        "low": np.full((2, 3), 1.5, dtype=np.float32),
        "high": np.arange(7.0),
    }
    alone = Snapshot(version=4, parts=[planes[0].expose(whole, 4)])
    assert alone.checksum == snapshot.checksum


def test_a_name_that_no_part_holds_is_refused(planes: list[WeightPlane]) -> None:
    with pytest.raises(BoundaryError, match="'middle' is not exposed"):
        pull_named(planes[0], _two_parts(planes), {"middle": np.zeros(3)})


def test_a_part_of_another_version_fails_the_whole_pull(planes: list[WeightPlane]) -> None:
    snapshot = _two_parts(planes, versions=(4, 5))
    with pytest.raises(BoundaryError, match="version"):
        pull_named(planes[0], snapshot, {"embed": np.zeros(5), "high": np.zeros(7)})


@pytest.mark.parametrize("num_readers", [1, 2, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_any_layout_reads_what_any_other_exposed(
    make_plane: PlaneMaker, num_parts: int, num_readers: int
) -> None:
    """Layers by stages; the embedding is at both ends."""
    numbers = np.random.default_rng(num_parts)
    layers = [f"layer{number}" for number in range(8)]
    whole = {name: numbers.standard_normal((3, 4)).astype(np.float32) for name in layers}
    whole["embed"] = numbers.standard_normal((5, 4)).astype(np.float32)
    size = len(layers) // num_parts
    parts = []
    for stage in range(num_parts):
        is_end = stage in (0, num_parts - 1)
        names = layers[stage * size : (stage + 1) * size] + ["embed"] * is_end
        parts.append(make_plane().expose({name: whole[name] for name in names}, 3))
    for reader in range(num_readers):
        names = [*layers[reader::num_readers], "embed"]
        into = {name: np.zeros_like(whole[name]) for name in names}
        assert pull_named(make_plane(), Snapshot(version=3, parts=parts), into) == 3
        assert all(into[name].tobytes() == whole[name].tobytes() for name in names)


def test_a_part_whose_stage_is_gone_fails_what_needs_it_and_nothing_else(
    planes: list[WeightPlane],
) -> None:
    snapshot = _two_parts(planes)
    planes[1].close()
    assert pull_named(planes[0], snapshot, {"embed": np.zeros(5)}) == 4
    with pytest.raises(BoundaryError, match="weights: gone") as caught:
        pull_named(planes[0], snapshot, {"embed": np.zeros(5), "high": np.zeros(7)})
    assert caught.value.retryable
