"""One number over the weights an engine was given, comparable with a snapshot's `checksum`.

Must not know: torch. Tensors are numpy arrays here, bfloat16 as its uint16 bits.
"""

import zlib
from collections.abc import Iterable

import numpy as np


def crc32_of(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def combined(crcs: Iterable[int]) -> int:
    """Of per-tensor crc32s in the order of the snapshot's tensors (see Snapshot.checksum)."""
    total = 0
    for crc in crcs:
        total = (total * 1_000_003 + crc) % 2**61
    return total
