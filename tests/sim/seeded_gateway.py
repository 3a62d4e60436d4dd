"""The gateway of a seeded world: the real one, with its records and doors watched."""

from pathlib import Path
from typing import Any

from opengyre.gateway.gateway import Gateway
from opengyre.seams.records import SegmentRef, TokenRecord
from opengyre.store.segments import SegmentWriter


class WatchedSegments(SegmentWriter):
    """Each record is checked as it is written; `watch` is the world."""

    def __init__(self, folder: Path, watch: Any) -> None:
        super().__init__(folder)
        self._watch = watch

    def append(self, record: TokenRecord) -> SegmentRef:
        self._watch.see_record(record)
        return super().append(record)


class WatchedGateway(Gateway):
    """A door opens only at an engine that serves its due version (P6)."""

    watch: Any = None

    def open_door(self, engine_id: str) -> None:
        self.watch.see_open_door(engine_id)
        super().open_door(engine_id)

    @property
    def num_sessions(self) -> int:
        return len(self._open)
