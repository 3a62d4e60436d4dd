import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from opengyre.seams.errors import BoundaryError
from opengyre.transport.weights_shm import SharedMemoryPlane


def test_files_of_a_killed_exposer_of_the_same_slot_are_removed_by_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "c1.grad.4711abcd.0.weights").write_bytes(b"left behind")
    (tmp_path / "c1.grad.4711abcd.1.part").write_bytes(b"half written")
    (tmp_path / "c1.grad.2.4711abcd.0.weights").write_bytes(b"another slot")
    plane = SharedMemoryPlane(tmp_path, slot="c1.grad")
    plane.expose({"w": np.zeros(3)}, 1)
    assert len(list(tmp_path.iterdir())) == 2
    plane.close()
    assert [path.name for path in tmp_path.iterdir()] == ["c1.grad.2.4711abcd.0.weights"]


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


class _Watched(Mapping[str, np.ndarray]):
    """Tensors that note how many bytes the folder holds while they are written."""

    def __init__(self, folder: Path, arrays: dict[str, np.ndarray]) -> None:
        self._folder = folder
        self._arrays = arrays
        self.seen_bytes: list[int] = []

    def __getitem__(self, name: str) -> np.ndarray:
        self.seen_bytes.append(sum(one.stat().st_size for one in self._folder.iterdir()))
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def test_the_published_version_and_the_present_one_take_the_room_of_two(tmp_path: Path) -> None:
    """Bursts of six steps, as the core exposes its weights; the next one being written counts."""
    plane = SharedMemoryPlane(tmp_path, slot="w", num_newest=1)
    arrays = {"a": np.zeros(5000), "b": np.zeros(300, dtype=np.float32)}
    one_bytes = 64 + 40_000 + 1216
    published = 0
    for version in range(20):
        watched = _Watched(tmp_path, arrays)
        plane.expose(watched, version, pinned=[published])
        assert max(watched.seen_bytes) <= 2 * one_bytes
        if version % 6 == 0:
            published = version
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) == 2 * one_bytes
    plane.close()


def test_a_folder_without_room_is_a_clear_error_and_keeps_no_half_file(tmp_path: Path) -> None:
    plane = SharedMemoryPlane(tmp_path, slot="w")
    kept = plane.expose({"w": np.zeros(3)}, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(BoundaryError, match="cannot expose"):
            plane.expose({"w": np.zeros(1_000_000)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [str(one) for one in tmp_path.iterdir()] == [kept.address]
    assert plane.pull(kept, {"w": np.zeros(3)}) == 1
    plane.close()
