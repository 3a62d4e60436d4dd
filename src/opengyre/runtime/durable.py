"""What a gateway's last life left on disk of the sessions that go on, read once before serving.

Must not know: HTTP, trees, engines. Invariants: what was not told yet is synced before anyone is
told; a record belongs to the launch whose turns come after the session's `first_turn`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from opengyre.runtime.book import turn_number
from opengyre.runtime.messages import GatewaySetup
from opengyre.seams.records import SegmentRef, TokenRecord
from opengyre.store.segments import SegmentReader, make_durable, segment_numbers

Records = dict[str, list[TokenRecord]]


async def recover(setup: GatewaySetup) -> Records:
    """By execution, in the order they were written. Raises BoundaryError."""
    if not setup.sessions:
        return {}
    folder = Path(setup.tokens_dir)
    segments = [one for one in segment_numbers(folder) if one >= setup.first_segment]
    last = -1 if setup.told is None else setup.told.segment
    await asyncio.to_thread(make_durable, folder, [one for one in segments if one >= last])
    return await asyncio.to_thread(_records, setup, segments)


def untold(records: Sequence[TokenRecord], told: SegmentRef | None) -> Sequence[TokenRecord]:
    """Those that lie behind the last one that was told."""
    if told is None:
        return records
    return [one for one in records if _place(one.header.ref) > _place(told)]


def _place(ref: SegmentRef) -> tuple[int, int]:
    return ref.segment, ref.offset_bytes


def _records(setup: GatewaySetup, segments: Sequence[int]) -> Records:
    first_turns = {one.execution: one.first_turn for one in setup.sessions}
    found: Records = {execution: [] for execution in first_turns}
    reader = SegmentReader(Path(setup.tokens_dir))
    for segment in segments:
        for record in reader.scan(segment):
            header = record.header
            first_turn = first_turns.get(header.execution)
            if first_turn is not None and turn_number(header.turn) > first_turn:
                found[header.execution].append(record)
    return found
