"""The weight plane seam: expose tensors under a version, pull a verified copy elsewhere.

Implementations: shared memory on one host, TCP. A pull checks the version before and after the
copy and a checksum per tensor; a mismatch raises BoundaryError("weights", retryable=True).
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`dtype` is a numpy name; bf16 travels as its uint16 bits with dtype "bfloat16"."""

    name: str
    shape: list[int]
    dtype: str
    offset_bytes: int
    num_bytes: int
    crc32: int


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Where exposed tensors are. `address`: a file path for "shm", host:port/key for "tcp"."""

    plane: str
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
        total = 0
        for spec in self.tensors:
            total = (total * 1_000_003 + spec.crc32) % 2**61
        return total


class WeightPlane(Protocol):
    def expose(self, tensors: Mapping[str, np.ndarray], version: int) -> Descriptor:
        """Copy `tensors` out under `version`; replaces what this plane exposed before under
        the same slot. The copy is stable until the next expose or close."""
        ...

    def pull(self, descriptor: Descriptor, into: Mapping[str, np.ndarray]) -> int:
        """Copy in place what `into` names (same shapes and dtypes) and return the verified
        version. Raises BoundaryError for a name that is not exposed."""
        ...

    def close(self) -> None: ...
