"""The weight plane seam: expose tensors under a version, pull a verified copy elsewhere.

Implementations: shared memory on one host, TCP. A pull checks the version before and after the
copy and a checksum per tensor; a mismatch raises BoundaryError("weights", retryable=True).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, Protocol

import msgspec
import numpy as np

PlaneKind = Literal["shm", "tcp"]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`dtype` is a numpy name; bf16 travels as its uint16 bits with dtype "bfloat16". `checksum` is
    xxh3_64 of the bytes."""

    name: str
    shape: list[int]
    dtype: str
    offset_bytes: int
    num_bytes: int
    checksum: int


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Where exposed tensors are. `address`: a file path for "shm", host:port/key for "tcp"."""

    plane: PlaneKind
    address: str
    version: int
    tensors: list[TensorSpec]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one version, exposed by the pipeline stages of a cell: one part for each, in
    order. What two stages hold (a tied embedding) is in both parts, with the same numbers."""

    version: int
    parts: list[Descriptor]

    @property
    def tensors(self) -> list[TensorSpec]:
        """Each name once, the first part's."""
        by_name = {spec.name: spec for part in reversed(self.parts) for spec in part.tensors}
        names = dict.fromkeys(spec.name for part in self.parts for spec in part.tensors)
        return [by_name[name] for name in names]

    @property
    def checksum(self) -> int:
        """One number over all tensors, for comparing what two engines verified."""
        return combined(spec.checksum for spec in self.tensors)


def combined(checksums: Iterable[int]) -> int:
    """One number over checksums of tensors, by their order."""
    total = 0
    for one in checksums:
        total = (total * 1_000_003 + one) % 2**61
    return total


class WeightPlane(Protocol):
    def expose(
        self, tensors: Mapping[str, np.ndarray], version: int, *, pinned: Collection[int] = ()
    ) -> Descriptor:
        """Copy `tensors` out under `version`. The copy is stable until it is withdrawn: by `close`,
        or when it is none of the newest ones any more and its version is not in `pinned`. What is
        withdrawn goes first, so that there is room. Raises BoundaryError without it."""
        ...

    @property
    def exposed_bytes(self) -> int:
        """Of all copies that can be pulled now."""
        ...

    def pull(self, descriptor: Descriptor, into: Mapping[str, np.ndarray]) -> int:
        """Copy in place what `into` names (same shapes and dtypes) and return the verified
        version; only these bytes move. Raises BoundaryError for a name that is not exposed."""
        ...

    def close(self) -> None: ...
