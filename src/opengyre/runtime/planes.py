"""The weight planes that a process of a cell exposes by, and copying a snapshot out of one."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from opengyre.runtime.messages import CellSetup
from opengyre.seams.weights import PlaneKind, Snapshot, WeightPlane
from opengyre.transport.snapshots import pull_named
from opengyre.transport.weights_shm import SharedMemoryPlane
from opengyre.transport.weights_tcp import TcpPlane

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    weights: WeightPlane
    gradients: WeightPlane


@contextlib.contextmanager
def open_planes(setup: CellSetup, *, kind: PlaneKind = "shm", stage: int = 0) -> Iterator[Planes]:
    """Two planes for a pipeline stage; what they exposed is gone afterwards, or removed by the next
    life of the same stage.

    Of weights the newest version is kept, which its step's members pull, beside the published one,
    which an engine that is started again loads at any time: whoever exposes pins that. Of gradients
    the two newest, as a reduction that is tried again may still be read the first time.
    """
    folder, slot = Path(setup.plane_dir), f"{setup.engine}-{stage}"
    planes = Planes(
        weights=_plane(kind, folder, slot=f"{slot}-weights", num_newest=1),
        gradients=_plane(kind, folder, slot=f"{slot}-gradients", num_newest=2),
    )
    try:
        yield planes
    finally:
        planes.weights.close()
        planes.gradients.close()


def pull_all(plane: WeightPlane, snapshot: Snapshot) -> Mapping[str, Array]:
    """Every tensor of a snapshot in fresh memory. Raises BoundaryError if it does not verify."""
    into = {
        spec.name: np.empty(spec.shape, dtype=_numpy_dtype(spec.dtype)) for spec in snapshot.tensors
    }
    pull_named(plane, snapshot, into)
    return into


def _plane(kind: PlaneKind, folder: Path, *, slot: str, num_newest: int) -> WeightPlane:
    match kind:
        case "shm":
            return SharedMemoryPlane(folder, slot=slot, num_newest=num_newest)
        case "tcp":
            return TcpPlane(num_newest=num_newest)
        case _:
            assert_never(kind)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """bfloat16 travels as its bits (see seams.weights)."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)
