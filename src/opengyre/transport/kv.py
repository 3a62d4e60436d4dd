"""Reading a pinned prefix: what every reading promises, whatever the kind of its place.

Must not know: engines, tokens. Invariants: bytes count only after `check`, which says that the pin
stood until they were copied; whatever a place says is tried against what is there.
"""

from typing import Any, Protocol

import numpy as np

from opengyre.seams.errors import BoundaryError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class KVReading(Protocol):
    def is_here(self) -> bool:
        """Every byte can be copied without waiting."""
        ...

    async def wait_here(self) -> None:
        """Raises BoundaryError when the bytes cannot come."""
        ...

    def copy(self, number: int, into: Bytes) -> None:
        """Range `number` into uint8 [range_bytes], contiguous; in any thread. Raises BoundaryError
        for what is not there."""
        ...

    def check(self) -> None:
        """Raises BoundaryError if the pin did not stand until now."""
        ...

    def close(self) -> None:
        """Nothing is read any more. Idempotent."""
        ...


def gone(reason: str) -> BoundaryError:
    return BoundaryError("kv", reason, retryable=False)
