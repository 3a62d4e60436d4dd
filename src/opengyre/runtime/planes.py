"""The weight planes a cell's process exposes by, and copying a whole snapshot out of one."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opengyre.runtime.messages import CellSetup
from opengyre.seams.weights import Snapshot
from opengyre.transport.snapshots import pull_named
from opengyre.transport.weights_shm import SharedMemoryPlane

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    weights: SharedMemoryPlane
    gradients: SharedMemoryPlane


@contextlib.contextmanager
def open_planes(setup: CellSetup, *, steps_per_burst: int) -> Iterator[Planes]:
    """Two planes in shared memory; what they exposed is gone afterwards.

    A published version must last until the next one: an engine that is started again in between
    loads it. One exposure for each step of a burst, the two publications around it, no more.
    """
    folder, owner = Path(setup.plane_dir), f"{setup.engine}-{setup.incarnation}"
    planes = Planes(
        weights=SharedMemoryPlane(folder, slot=f"{owner}-weights", num_kept=steps_per_burst + 2),
        gradients=SharedMemoryPlane(folder, slot=f"{owner}-gradients"),
    )
    try:
        yield planes
    finally:
        planes.weights.close()
        planes.gradients.close()


def pull_all(plane: SharedMemoryPlane, snapshot: Snapshot) -> Mapping[str, Array]:
    """Every tensor of a snapshot in fresh memory. Raises BoundaryError if it does not verify."""
    into = {
        spec.name: np.empty(spec.shape, dtype=_numpy_dtype(spec.dtype)) for spec in snapshot.tensors
    }
    pull_named(plane, snapshot, into)
    return into


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """bfloat16 travels as its bits (see seams.weights)."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)
