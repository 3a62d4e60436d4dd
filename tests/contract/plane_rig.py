"""Exposers and readers for tests of the weight planes: of either kind, in this process or another.

Owns: making them, ending them, and a mapping that does something in the middle of a pull.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from opengyre.seams.weights import Descriptor, WeightPlane
from opengyre.transport.weights_shm import SharedMemoryPlane
from opengyre.transport.weights_tcp import TcpPlane

KINDS = ("shm", "tcp")
DEADLINE_S = 30


class PlaneMaker:
    """Planes of one kind over one folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self._made: list[WeightPlane] = []

    def __call__(self, *, num_newest: int = 2) -> WeightPlane:
        plane: WeightPlane
        if self.kind == "shm":
            slot = f"slot{len(self._made)}"
            plane = SharedMemoryPlane(self.folder, slot=slot, num_newest=num_newest)
        else:
            plane = TcpPlane(num_newest=num_newest)
        self._made.append(plane)
        return plane

    def close(self) -> None:
        """Nothing may be left."""
        for plane in self._made:
            plane.close()
        assert list(self.folder.iterdir()) == []
        assert [one.name for one in threading.enumerate() if "weights" in one.name] == []


class Interrupted(Mapping[str, np.ndarray]):
    """Targets of a pull; `act` runs once, when the reader comes to the tensor `at`."""

    def __init__(
        self, arrays: dict[str, np.ndarray], *, at: str, act: Callable[[], object]
    ) -> None:
        self._arrays = arrays
        self._at = at
        self._acts = [act]

    def __getitem__(self, name: str) -> np.ndarray:
        if name == self._at and self._acts:
            self._acts.pop()()
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


@contextlib.contextmanager
def exposer(
    kind: str, folder: Path, num_floats: int
) -> Iterator[tuple[subprocess.Popen[bytes], Descriptor]]:
    """A process that has exposed version 1 of `tensors_of(num_floats)`; killed at the end."""
    command = [sys.executable, str(Path(__file__)), kind, str(folder), str(num_floats)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, msgspec.json.decode(process.stdout.readline(), type=Descriptor)
        finally:
            process.kill()


def tensors_of(num_floats: int) -> dict[str, np.ndarray]:
    numbers = np.arange(num_floats, dtype=np.float32)
    return {"first": numbers[:1000], "middle": numbers, "last": numbers[-1000:]}


def targets_of(num_floats: int) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(one) for name, one in tensors_of(num_floats).items()}


def _expose_and_wait(kind: str, folder: str, num_floats: str) -> None:
    maker = PlaneMaker(kind, Path(folder))
    descriptor = maker().expose(tensors_of(int(num_floats)), 1)
    sys.stdout.buffer.write(msgspec.json.encode(descriptor) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    maker.close()


if __name__ == "__main__":
    _expose_and_wait(*sys.argv[1:])
