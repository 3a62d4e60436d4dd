"""Opens the reading of a pinned prefix by the kind of its place.

Must not know: engines, tokens, how bytes are read.
"""

from opengyre.seams.kv import KVPlace
from opengyre.transport import kv_memory, kv_tcp
from opengyre.transport.kv import KVReading, gone


def open_reading(place: KVPlace) -> KVReading:
    """Raises BoundaryError for a place that is gone, or none."""
    match place.kind:
        case kv_memory.KIND:
            return kv_memory.MemoryReading(place)
        case kv_tcp.KIND:
            return kv_tcp.TcpReading(place)
        case _:
            raise gone(f"nothing is read from a place of kind {place.kind!r}")
