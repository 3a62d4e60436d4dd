"""What recording costs: a body from bytes to keys, its delta, an execution on disk and back.

Run: `python benchmarks/recording.py`. Times are the best of several, in ms per MB of the body; the
machine is whatever it is, the ratio to reading the JSON alone is what to compare. Sizes are exact.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from harness_bodies import NUM_SAMPLED, Conversation, turn_record
from msgspec.structs import replace
from tokenizers import Tokenizer

from opengyre.gateway.body import decode_object
from opengyre.gateway.delta import body_delta, restore_body
from opengyre.gateway.dialects.registry import DIALECTS
from opengyre.gateway.history import Keys
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.restoring import Earlier, restore_session
from opengyre.gateway.sessions import Session
from opengyre.seams.records import TokenRecord
from opengyre.store.segments import SegmentWriter

MODEL = Path(__file__).parents[1] / "examples" / "quickstart" / "model"

NUM_TURNS = 300
NUM_TOKENS = 700_000
CHARS_PER_TOKEN = 4
ROUNDS = 5
PROTOCOLS = {"claude": "anthropic", "codex": "openai-responses", "chat": "openai-chat"}
SIZES = (1, 30, 100, 300)


def main() -> None:
    chars = NUM_TOKENS * CHARS_PER_TOKEN // NUM_TURNS - 1_000
    conversation = Conversation(seed=1, num_turns=NUM_TURNS, result_chars=chars)
    print("| shape | turn | body MB | JSON | parse | keys | all | x JSON | delta | restore |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in conversation.shapes:
        for n in SIZES:
            print(reading_row(conversation, shape, n))
    print("\n| shape | bodies MB | deltas MB | ids, logprobs, headers MB | on disk MB |")
    print("|---|---|---|---|---|")
    for shape in conversation.shapes:
        print(size_row(conversation, shape))
    print("\n| a session restored | turns | body MB | prompt tokens | s |")
    print("|---|---|---|---|---|")
    for n in SIZES[1:]:
        print(restoring_row(conversation, n))


def reading_row(conversation: Conversation, shape: str, n: int) -> str:
    body_of, dialect = conversation.shapes[shape], DIALECTS[PROTOCOLS[shape]]
    body, parent = body_of(n), body_of(n - 1) if n > 1 else b""
    raw, request = decode_object(body), dialect.parse(decode_object(body))
    delta = body_delta(body, parent)
    per_mb = 1e3 / (len(body) / 1e6)
    json_ms, parse_ms, keys_ms, delta_ms, restore_ms = (
        per_mb * best_s(work)
        for work in (
            lambda: decode_object(body),
            lambda: dialect.parse(raw),
            lambda: Keys(request.offered_tools).all(request.messages),
            lambda: body_delta(body, parent),
            lambda: restore_body(delta, parent),
        )
    )
    all_ms = json_ms + parse_ms + keys_ms
    cells = [json_ms, parse_ms, keys_ms, all_ms, all_ms / json_ms, delta_ms, restore_ms]
    told = " | ".join(f"{cell:.1f}" for cell in cells)
    return f"| {shape} | {n} | {len(body) / 1e6:.2f} | {told} |"


def best_s(work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun_s)
    return best


def size_row(conversation: Conversation, shape: str) -> str:
    """A whole execution through the segment writer."""
    body_of, parent = conversation.shapes[shape], b""
    num_kept = num_bodies = num_deltas = 0
    with tempfile.TemporaryDirectory() as folder:
        writer = SegmentWriter(Path(folder))
        for n in range(1, NUM_TURNS + 1):
            body = body_of(n)
            delta = body_delta(body, parent)
            num_new = (len(body) - len(parent)) // CHARS_PER_TOKEN
            record = turn_record(n, num_kept=num_kept, num_new=num_new, delta=delta)
            writer.append(record)
            num_kept += num_new + len(record.completion_ids)
            num_bodies += len(body)
            num_deltas += len(delta)
            parent = body
        asyncio.run(writer.close())
        num_disk = sum(one.stat().st_size for one in Path(folder).iterdir())
    sizes = (num_bodies, num_deltas, num_disk - num_deltas, num_disk)
    return f"| {shape} | " + " | ".join(f"{size / 1e6:.2f}" for size in sizes) + " |"


def restoring_row(conversation: Conversation, num_turns: int) -> str:
    """As after a gateway's death; answers are text of the usual length."""
    renderer, parent, num_kept = load_renderer(MODEL), b"", 0
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    records: list[TokenRecord] = []
    for n in range(1, num_turns + 1):
        body = conversation.chat(n)
        num_new = max(1, len(body) - len(parent)) // CHARS_PER_TOKEN
        delta = body_delta(body, parent)
        record = turn_record(n, num_kept=num_kept, num_new=num_new, delta=delta)
        ids = tokenizer.encode(conversation.task, add_special_tokens=False).ids[:NUM_SAMPLED]
        records.append(replace(record, completion_ids=ids))
        num_kept += num_new + NUM_SAMPLED
        parent = body

    def restore() -> None:
        session = Session(execution="e000001", renderer=renderer, max_context_tokens=2**31)
        assert not restore_session(session, Earlier(records=records))

    took_s = best_s(restore)
    return f"| chat | {num_turns} | {len(parent) / 1e6:.2f} | {num_kept} | {took_s:.2f} |"


if __name__ == "__main__":
    main()
