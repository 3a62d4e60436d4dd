"""What a long execution takes on disk: 300 turns and 700,000 tokens, in three shapes of bodies."""

import asyncio
from pathlib import Path

import pytest
from harness_bodies import NUM_SAMPLED, Conversation, turn_record

from opengyre.gateway.delta import body_delta, restore_body
from opengyre.store.segments import SegmentReader, SegmentWriter

NUM_TURNS = 300
NUM_TOKENS = 700_000
MAX_BYTES = 40_000_000
CHARS_PER_TOKEN = 4


@pytest.mark.parametrize("shape", ["claude", "codex", "chat"])
def test_a_long_execution_takes_its_new_bytes_only(tmp_path: Path, shape: str) -> None:
    chars = NUM_TOKENS * CHARS_PER_TOKEN // NUM_TURNS - 1_000
    body_of = Conversation(seed=1, num_turns=NUM_TURNS, result_chars=chars).shapes[shape]
    writer, parent, num_tokens = SegmentWriter(tmp_path), b"", 0
    for n in range(1, NUM_TURNS + 1):
        body = body_of(n)
        num_new = max(1, len(body) - len(parent)) // CHARS_PER_TOKEN
        delta = body_delta(body, parent)
        writer.append(turn_record(n, num_kept=num_tokens, num_new=num_new, delta=delta))
        num_tokens += num_new + NUM_SAMPLED
        parent = body
    asyncio.run(writer.close())
    assert num_tokens > NUM_TOKENS
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < MAX_BYTES / 4
    restored = b""
    for record in SegmentReader(tmp_path).scan(0):
        restored = restore_body(record.request_delta, restored)
    assert restored == parent
