"""What one turn costs before a token is sampled: its text to ids, its body to a request.

Owns nothing but the timing. Two curves, each as a ratio to a bound of the same run: extending a
prompt against encoding the new text alone, and reading a body against decoding its JSON alone.
Run: `python benchmarks/rendering.py`.
"""

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from opengyre.gateway import body as bodies
from opengyre.gateway.dialects.anthropic import Anthropic
from opengyre.gateway.dialects.dialect import Dialect
from opengyre.gateway.dialects.openai_chat import OpenAIChat
from opengyre.gateway.dialects.openai_responses import OpenAIResponses
from opengyre.gateway.history import Keys, call_key
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.rendering.tokenizer import TokenizerAdapter, read_tokenizer
from opengyre.gateway.request import Call, Message, Role

MODEL = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "model"
NEW_TEXT_CHARS = 8_000
HISTORY_TOKENS = (1_000, 10_000, 100_000, 350_000, 700_000)
BODY_MB = (0.1, 1, 3, 10, 30)
TURN_BYTES = 8_000
NUM_RUNS = 9
_MB = 1_000_000
_WORDS = (
    "def",
    "return",
    "self",
    "value:",
    '"path"',
    "for",
    "x",
    "in",
    "range(10):\n",
    "    ",
    "é",
)


def best_ms(act: Callable[[], object], num_runs: int = NUM_RUNS) -> float:
    """Processor time, without the garbage collector: it would walk the histories of this file."""
    spent = []
    gc.collect()
    gc.disable()
    for _ in range(num_runs):
        begin_s = time.process_time()
        act()
        spent.append(time.process_time() - begin_s)
    gc.enable()
    return min(spent) * 1_000


def text(num_chars: int, seed: int) -> str:
    rng = random.Random(seed)
    words = rng.choices(_WORDS, k=num_chars // 4)
    return " ".join(words)[:num_chars]


def extend_curve() -> None:
    renderer = load_renderer(MODEL)
    bound = TokenizerAdapter(read_tokenizer(MODEL), name="bound")
    call = Call(call_id="c", name="bash", arguments='{"command": "ls"}')
    answer = bound.encode(
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    )
    result = text(NEW_TEXT_CHARS, 1)
    new = [Message(role=Role.TOOL, text=result, call_id="c")]
    start = renderer.root([Message(role=Role.USER, text="Go on.")], ())
    bound_ms = best_ms(lambda: bound.encode(result))
    print(f"encoding the {NEW_TEXT_CHARS} new characters alone: {bound_ms:.2f} ms")
    print(
        "history tokens |   ids that follow | of the bound | whole prompt as a list | bridge of all"
    )
    filler = bound.encode(text(40_000, 2))
    for num in HISTORY_TOKENS:
        prompt = (start + filler * (num // len(filler) + 1))[: num - len(start)] + start
        turn = (prompt, answer, new)
        added = best_ms(lambda t=turn: renderer.extension(*t, calls=[call]))
        whole = best_ms(lambda t=turn: renderer.extend(*t, calls=[call]))
        bridge = best_ms(lambda p=prompt: bridge_whole(renderer, p, answer, result))
        print(
            f"{num:>14,} | {added:14.2f} ms | {added / bound_ms:12.2f} |"
            f" {whole:19.2f} ms | {bridge:10.2f} ms"
        )


def bridge_whole(renderer: Any, prompt: list[int], answer: list[int], result: str) -> object:
    """What the renderer takes when it is given the whole prompt."""
    chat = [{"role": "tool", "content": result, "tool_call_id": "c"}]
    return renderer._renderer.bridge_to_next_turn(prompt, answer, chat)


def chat_body(num_bytes: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]
    for k in range(max(1, num_bytes // TURN_BYTES)):
        call = {
            "name": "bash",
            "arguments": msgspec.json.encode({"command": text(300, k)}).decode(),
        }
        calls = [{"id": f"c{k}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"c{k}", "content": text(TURN_BYTES, k)})
    return {"model": "policy", "messages": messages}


def anthropic_body(num_bytes: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]
    for k in range(max(1, num_bytes // TURN_BYTES)):
        use = {
            "type": "tool_use",
            "id": f"c{k}",
            "name": "bash",
            "input": {"command": text(300, k)},
        }
        messages.append({"role": "assistant", "content": [use]})
        result = [{"type": "text", "text": text(TURN_BYTES, k)}]
        block = {"type": "tool_result", "tool_use_id": f"c{k}", "content": result}
        messages.append({"role": "user", "content": [block]})
    return {"model": "policy", "max_tokens": 100, "messages": messages}


def responses_body(num_bytes: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "Go on."}]
    for k in range(max(1, num_bytes // TURN_BYTES)):
        arguments = msgspec.json.encode({"command": text(300, k)}).decode()
        call = {"type": "function_call", "call_id": f"c{k}", "name": "bash", "arguments": arguments}
        result = {"type": "function_call_output", "call_id": f"c{k}", "output": text(TURN_BYTES, k)}
        items += [call, result]
    return {"model": "policy", "input": items}


def body_curve(dialect: Dialect, make: Callable[[int], dict[str, Any]]) -> None:
    print(f"\n{dialect.name}: ms per MB of body")
    print("   MB | decode alone | decode |  parse |   keys |   rest |  whole | of the bound")
    for size in BODY_MB:
        body = msgspec.json.encode(make(int(size * _MB)))
        num_mb, num_runs = len(body) / _MB, 4 if size > 3 else NUM_RUNS
        raw = bodies.decode_object(body)
        request = dialect.parse(raw)
        acts: list[Callable[[], object]] = [
            lambda b=body: msgspec.json.decode(b),
            lambda b=body: bodies.decode_object(b),
            lambda r=raw: dialect.parse(r),
            lambda r=request: Keys(r.tools).all(r.messages),
            lambda r=raw: call_key(r, b""),
        ]
        bound, *parts = [best_ms(act, num_runs) / num_mb for act in acts]
        cells = " | ".join(f"{part:6.2f}" for part in parts)
        print(f"{size:5} | {bound:12.2f} | {cells} | {sum(parts):5.2f} | {sum(parts) / bound:.2f}")


def main() -> None:
    extend_curve()
    body_curve(OpenAIChat(), chat_body)
    body_curve(Anthropic(), anthropic_body)
    body_curve(OpenAIResponses(), responses_body)


if __name__ == "__main__":
    main()
