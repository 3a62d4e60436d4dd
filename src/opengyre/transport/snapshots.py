"""Pulling tensors by name out of a snapshot in parts, whatever layout the reader has.

Must not know: models, stages. Invariant: all parts are of the snapshot's version, or the pull
fails; a name is taken from the first part that holds it.
"""

from collections.abc import Mapping

from opengyre.seams.weights import Snapshot, WeightPlane
from opengyre.transport.weights import Array, mismatch, torn


def pull_named(plane: WeightPlane, snapshot: Snapshot, into: Mapping[str, Array]) -> int:
    """Fill every array of `into`; returns the verified version. Raises BoundaryError; `into` is
    undefined then."""
    missing = dict(into)
    for part in snapshot.parts:
        ours = {spec.name: missing.pop(spec.name) for spec in part.tensors if spec.name in missing}
        if not ours:
            continue
        verified = plane.pull(part, ours)
        if verified != snapshot.version:
            raise torn(f"a part is of version {verified}, not {snapshot.version}")
    if missing:
        raise mismatch(f"tensor {sorted(missing)[0]!r} is not exposed")
    return snapshot.version
