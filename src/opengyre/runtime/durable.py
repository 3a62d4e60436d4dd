"""What earlier lives of a gateway left on disk of the sessions that go on, read before serving.

Must not know: HTTP, trees, engines. Invariants: what was not told yet is synced before anyone is
told; a record belongs to the launch whose turns come after the session's `first_turn`; what is read
is proportional to what these sessions own and to what came after the last told turn.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opengyre.runtime.book import turn_number
from opengyre.runtime.messages import GatewaySetup
from opengyre.seams.records import SegmentRef, TokenRecord
from opengyre.store.segments import SegmentReader, make_durable, segment_numbers


@dataclass(slots=True, kw_only=True)
class Recovered:
    """Records of one session, each in the order they were written: those that the controller
    knows, and those that nobody was told of."""

    told: list[TokenRecord] = field(default_factory=list)
    untold: list[TokenRecord] = field(default_factory=list)


async def recover(setup: GatewaySetup) -> dict[str, Recovered]:
    """By execution. Raises BoundaryError."""
    if not setup.sessions:
        return {}
    folder = Path(setup.tokens_dir)
    first = 0 if setup.told is None else setup.told.segment
    late = [one for one in segment_numbers(folder) if one >= first]
    await asyncio.to_thread(make_durable, folder, late)
    return await asyncio.to_thread(_read, setup, late)


def _read(setup: GatewaySetup, late: Sequence[int]) -> dict[str, Recovered]:
    reader = SegmentReader(Path(setup.tokens_dir))
    found = {
        one.execution: Recovered(told=[reader.read(ref) for ref in one.turns])
        for one in setup.sessions
    }
    first_turns = {one.execution: one.first_turn for one in setup.sessions}
    for record in _behind(reader, late, setup.told):
        header = record.header
        first_turn = first_turns.get(header.execution)
        if first_turn is not None and turn_number(header.turn) > first_turn:
            found[header.execution].untold.append(record)
    return found


def _behind(
    reader: SegmentReader, segments: Sequence[int], told: SegmentRef | None
) -> Iterator[TokenRecord]:
    """Everything that lies behind the last told turn; other gateways' records are among it."""
    last = (-1, 0) if told is None else (told.segment, told.offset_bytes)
    for segment in segments:
        for record in reader.scan(segment):
            ref = record.header.ref
            if (ref.segment, ref.offset_bytes) > last:
                yield record
