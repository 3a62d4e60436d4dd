"""The checksum of one weight an engine was given, as the weight plane counts it.

Must not know: torch. Tensors are numpy arrays here, bfloat16 as its uint16 bits.
"""

import numpy as np

from opengyre.transport.weights import bytes_of, checksum_of


def checksum_of_array(array: np.ndarray) -> int:
    return checksum_of(bytes_of(np.ascontiguousarray(array)))
