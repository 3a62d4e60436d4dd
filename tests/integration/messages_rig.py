"""Anthropic's official SDK as a harness uses it: streams folded strictly, answers sent back."""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
from anthropic.types import RawMessageStreamEvent
from gateway_rig import Rig

Block = dict[str, Any]
Turn = Any
HELLO: list[Turn] = [{"role": "user", "content": "say hello"}]
PROPERTIES = {"command": {"type": "string"}, "timeout": {"type": "number"}}
BASH: Any = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": PROPERTIES},
}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
ROOM: dict[str, Any] = {"context_tokens": 100_000}
ODD_ARGUMENTS = [
    '{"command": "ls"}',
    '{"timeout": 5000.0, "command": "ls"}',
    '{ "command" :  "echo  \\u00e9\\ud83d\\ude00 " }',
    '{"command":"a\\tb", "timeout": 1.50}',
    '{"command": "x", "flag": true, "deep": {"b": [1.0, null], "a": ""}}',
    '{"command": "not closed}',
    '["ls"]',
    "{}",
]


@asynccontextmanager
async def client_of(rig: Rig, key: str = "key-1") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=f"{rig.gateway.address}/e000001", api_key=key, max_retries=0
    ) as client:
        yield client


def odd_answer(text: str, seed: int) -> str:
    """Depends on the text alone, so that a continued answer is the same."""
    dice = random.Random(text)
    thinking = dice.choice(["", "<think>\nfirst ls\n\n</think>\n\n", "<think>\n\n</think>\n\n"])
    words = dice.choice(["", "Let me look.  \n", "ünïcode 😀\n\n"])
    return (
        thinking
        + words
        + "\n".join(called(dice.choice(ODD_ARGUMENTS)) for _ in range(dice.choice([1, 1, 2])))
    )


def first_text(message: Any) -> str:
    """Of an answer that begins with text, as many programs read it."""
    return str(message.content[0].text)


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


def as_harness(raw: str) -> Any:
    """Arguments as Claude Code sends them back: in schema key order, no JSON wrapped."""
    try:
        value = json.loads(raw or "{}", parse_float=whole_or_float, parse_constant=no_number)
    except ValueError:
        return {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    if not isinstance(value, dict):
        return value
    known = [key for key in PROPERTIES if key in value]
    return {key: value[key] for key in [*known, *(key for key in value if key not in known)]}


def whole_or_float(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def no_number(text: str) -> float:
    raise ValueError(text)


class Folded:
    """A stream's events as a harness folds them; the grammar is checked on the way."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_deltas = 0
        self.kinds: list[str] = []
        self.start: Any = None
        self.end: Any = None
        self._open: int | None = None

    def add(self, event: RawMessageStreamEvent) -> None:
        self.kinds.append(event.type)
        match event.type:
            case "message_start":
                assert self.kinds == ["message_start"]
                self.start = event.message
            case "content_block_start":
                assert (event.index, self._open) == (len(self.blocks), None)
                self._open = event.index
                self.blocks.append({**event.content_block.model_dump(exclude_none=True)})
                if event.content_block.type == "tool_use":
                    self.blocks[-1]["input"] = ""
            case "content_block_delta":
                assert event.index == self._open
                self._extend(event.delta.model_dump())
            case "content_block_stop":
                assert event.index == self._open
                self._open = None
            case "message_delta":
                assert self._open is None
                self.end = event
            case "message_stop":
                assert self.end is not None

    def sent_back(self) -> list[Block]:
        """The blocks as a harness has them in its next request."""
        return [
            {**block, "input": as_harness(block["input"])} if "input" in block else block
            for block in self.blocks
        ]

    def _extend(self, delta: dict[str, Any]) -> None:
        self.num_deltas += 1
        name, field = {
            "text_delta": ("text", "text"),
            "thinking_delta": ("thinking", "thinking"),
            "signature_delta": ("signature", "signature"),
            "input_json_delta": ("input", "partial_json"),
        }[delta["type"]]
        self.blocks[-1][name] += delta[field]


async def streamed(client: anthropic.AsyncAnthropic, **body: Any) -> Folded:
    folded = Folded()
    stream = await client.messages.create(
        model="m", stream=True, **{"max_tokens": 4096, "messages": HELLO, **body}
    )
    async for event in stream:
        folded.add(event)
    assert folded.kinds[-2:] == ["message_delta", "message_stop"]
    return folded


async def turn(client: anthropic.AsyncAnthropic, *, is_stream: bool, **body: Any) -> list[Block]:
    """The blocks of one answer, as a harness sends them back."""
    if is_stream:
        return (await streamed(client, **body)).sent_back()
    whole = await client.messages.create(model="m", **{"max_tokens": 4096, **body})
    return [block.model_dump(exclude_none=True) for block in whole.content]


def results(blocks: list[Block]) -> list[Block]:
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call["id"], "content": f"result of {k}"}
        for k, call in enumerate(calls)
    ]


def prefixes_hold(rig: Rig, num_turns: int) -> None:
    """Every prompt begins with all that was before: one unbroken branch."""
    assert len(rig.recorder.records) == num_turns
    before: list[int] = []
    for k, record in enumerate(rig.recorder.records):
        prompt = rig.prompt_of(record)
        assert prompt[: len(before)] == before, f"turn {k + 1}"
        assert (record.header.fork_reason, record.header.num_kept_tokens) == ("", len(before))
        assert (record.header.protocol, len(record.logprobs)) == (
            "anthropic",
            len(record.completion_ids),
        )
        before = prompt + record.completion_ids
