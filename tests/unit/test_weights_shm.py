from pathlib import Path

import numpy as np
import pytest

from opengyre.seams.errors import BoundaryError
from opengyre.transport.weights_shm import SharedMemoryPlane


def test_files_of_a_killed_exposer_of_the_same_slot_are_removed_by_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "c1.grad.4711.0.weights").write_bytes(b"left behind")
    (tmp_path / "c1.grad.4711.1.part").write_bytes(b"half written")
    (tmp_path / "c1.grad.2.4711.0.weights").write_bytes(b"another slot")
    plane = SharedMemoryPlane(tmp_path, slot="c1.grad")
    plane.expose({"w": np.zeros(3)}, 1)
    assert len(list(tmp_path.iterdir())) == 2
    plane.close()
    assert [path.name for path in tmp_path.iterdir()] == ["c1.grad.2.4711.0.weights"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    plane = SharedMemoryPlane(tmp_path / "nowhere", slot="w")
    with pytest.raises(BoundaryError, match="nowhere"):
        plane.expose({"w": np.zeros(3)}, 1)


def test_a_file_that_is_no_exposure_is_refused(tmp_path: Path) -> None:
    plane = SharedMemoryPlane(tmp_path, slot="w")
    descriptor = plane.expose({"w": np.zeros(3)}, 1)
    Path(descriptor.address).write_bytes(b"x" * 500)
    with pytest.raises(BoundaryError, match="no weight file"):
        plane.pull(descriptor, {"w": np.zeros(3)})
    plane.close()


def test_at_most_the_kept_number_of_files_exists(tmp_path: Path) -> None:
    plane = SharedMemoryPlane(tmp_path, slot="w", num_newest=2)
    for version in range(5):
        plane.expose({"w": np.zeros(3)}, version)
    assert len(list(tmp_path.iterdir())) == 2
    plane.close()


class _ClosingTarget(dict[str, np.ndarray]):
    """Withdraws the exposure when the reader comes to its last tensor."""

    def __init__(self, plane: SharedMemoryPlane, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self._plane = plane

    def __getitem__(self, name: str) -> np.ndarray:
        if name == "last":
            self._plane.close()
        return super().__getitem__(name)


def test_an_exposure_that_is_withdrawn_during_the_copy_is_noticed(tmp_path: Path) -> None:
    plane = SharedMemoryPlane(tmp_path, slot="w")
    arrays = {"first": np.zeros(3), "last": np.zeros(3)}
    descriptor = plane.expose(arrays, 1)
    with pytest.raises(BoundaryError, match="withdrawn after the copy"):
        SharedMemoryPlane(tmp_path, slot="r").pull(descriptor, _ClosingTarget(plane, arrays))
