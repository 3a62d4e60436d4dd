"""What a gateway's last life left on disk of the sessions that go on, read once before serving.

Must not know: HTTP, trees, engines. Invariants: what was not told yet is synced before anyone is
told; a record belongs to the launch whose turns come after the session's `first_turn`.
"""

from pathlib import Path

from opengyre.runtime.book import turn_number
from opengyre.runtime.messages import GatewaySetup
from opengyre.seams.records import SegmentRef, TokenRecord
from opengyre.store.segments import SegmentReader, make_durable, segment_numbers

Records = dict[str, list[TokenRecord]]


def durable_records(setup: GatewaySetup) -> Records:
    """By execution, in the order they were written. Blocks; raises BoundaryError."""
    first_turns = {one.execution: one.first_turn for one in setup.sessions}
    found: Records = {execution: [] for execution in first_turns}
    if not found:
        return found
    folder = Path(setup.tokens_dir)
    segments = [one for one in segment_numbers(folder) if one >= setup.first_segment]
    last = -1 if setup.told is None else setup.told.segment
    make_durable(folder, [one for one in segments if one >= last])
    reader = SegmentReader(folder)
    for segment in segments:
        for record in reader.scan(segment):
            header = record.header
            first_turn = first_turns.get(header.execution)
            if first_turn is not None and turn_number(header.turn) > first_turn:
                found[header.execution].append(record)
    return found


def untold(records: list[TokenRecord], told: SegmentRef | None) -> list[TokenRecord]:
    """Those that lie behind the last one that was told."""
    if told is None:
        return records
    last = (told.segment, told.offset_bytes)
    return [one for one in records if (one.header.ref.segment, one.header.ref.offset_bytes) > last]
