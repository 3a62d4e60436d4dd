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
def planes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[WeightPlane]]:
    maker = PlaneMaker(request.param, tmp_path)
    yield [maker() for _ in range(2)]
    maker.close()


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
