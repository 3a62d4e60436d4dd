"""Where the gateway's token records go: appended now, durable after `sync`.

Implemented by the run folder's segment writer, and in memory where nothing is to be kept.
Invariant: a record may be told to others only after a `sync` that began after its `append`.
"""

from typing import Protocol

from opengyre.seams.records import SegmentRef, TokenRecord


class Recorder(Protocol):
    def append(self, record: TokenRecord) -> SegmentRef:
        """Write `record` (its header's `ref` is ignored), buffered, and say where.

        Raises BoundaryError when the disk refuses it.
        """
        ...

    async def sync(self) -> None:
        """Return when everything appended so far is durable."""
        ...
