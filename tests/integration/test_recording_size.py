"""What a long execution takes on disk: 300 turns and 700,000 tokens, in three shapes of bodies."""

import asyncio
import random
from pathlib import Path

import pytest
from harness_bodies import Conversation

from opengyre.gateway.body import body_delta, restore_body
from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.store.segments import SegmentReader, SegmentWriter

NUM_TURNS = 300
NUM_TOKENS = 700_000
MAX_BYTES = 40_000_000
CHARS_PER_TOKEN = 4
NUM_SAMPLED = 240


def turn_record(n: int, *, num_kept: int, num_new: int, delta: bytes) -> TokenRecord:
    source = random.Random(n)
    header = TurnRecord(
        turn=f"e000001.t{n}",
        execution="e000001",
        attempt=0,
        parent=f"e000001.t{n - 1}" if n > 1 else "",
        fork_reason="",
        role="main",
        num_kept_tokens=num_kept,
        num_new_prompt_tokens=num_new,
        num_completion_tokens=NUM_SAMPLED,
        spans=[Span(start=0, end=NUM_SAMPLED, policy_version=n // 40, engine="c1#2")],
        finish="stop",
        is_committed=True,
        ref=SegmentRef(segment=-1, offset_bytes=-1, crc32=0),
        received_s=1000.0 + n,
        first_token_s=1000.5 + n,
        ended_s=1001.0 + n,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=[source.randrange(151_643) for _ in range(num_new)],
        completion_ids=[source.randrange(151_643) for _ in range(NUM_SAMPLED)],
        logprobs=[-source.random() for _ in range(NUM_SAMPLED)],
        request_delta=delta,
    )


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
