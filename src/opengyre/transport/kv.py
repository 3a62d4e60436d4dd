"""Reading a pinned prefix: by which kind of place, and what every reading promises.

Must not know: engines, tokens. Invariants: bytes count only after `check`, which says that the pin
stood until they were copied; whatever a place says is tried against what is there.
"""

from typing import Any, Protocol

import numpy as np

from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVPlace

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


def open_reading(place: KVPlace) -> KVReading:
    """Raises BoundaryError for a place that is gone, or none."""
    from opengyre.transport.kv_memory import MemoryReading
    from opengyre.transport.kv_tcp import TcpReading

    match place.kind:
        case "shm":
            return MemoryReading(place)
        case "tcp":
            return TcpReading(place)
        case _:
            raise gone(f"nothing is read from a place of kind {place.kind!r}")


def gone(reason: str) -> BoundaryError:
    return BoundaryError("kv", reason, retryable=False)
