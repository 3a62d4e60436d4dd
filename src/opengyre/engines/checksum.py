"""Checksums: of one weight an engine was given, as the weight plane counts it; of tokens.

Must not know: torch. Tensors are numpy arrays here, bfloat16 as its uint16 bits.
"""

from collections.abc import Sequence

import numpy as np

from opengyre.transport.weights import bytes_of, checksum_of


def checksum_of_array(array: np.ndarray) -> int:
    return checksum_of(bytes_of(np.ascontiguousarray(array)))


def digest_of(ids: Sequence[int]) -> str:
    """Of the tokens that a KVRef covers."""
    return f"{checksum_of_array(np.asarray(ids, np.int64)):x}"
