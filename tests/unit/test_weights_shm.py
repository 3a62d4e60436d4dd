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
    (tmp_path / "c2.grad.4712.0.weights").write_bytes(b"another slot")
    plane = SharedMemoryPlane(tmp_path, slot="c1.grad")
    plane.expose({"w": np.zeros(3)}, 1)
    names = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert names == ["c1", "c2"]
    plane.close()
    assert [path.name for path in tmp_path.iterdir()] == ["c2.grad.4712.0.weights"]


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
    plane = SharedMemoryPlane(tmp_path, slot="w", num_kept=2)
    for version in range(5):
        plane.expose({"w": np.zeros(3)}, version)
    assert len(list(tmp_path.iterdir())) == 2
    plane.close()
