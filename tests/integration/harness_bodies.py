"""Long conversations as three kinds of harness send them, in text that compresses like real text.

`Conversation(seed, num_turns, result_chars)` has `claude(n)`, `codex(n)`, `chat(n)`: the n-th
request's bytes, n from 1. Words are random letters, so that nothing repeats by accident.
`turn_record` makes a record of random ids around a body's delta.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord

_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_WEIGHTS = range(len(_LETTERS), 0, -1)
_FIRST_CHARS = 100_000
NUM_SAMPLED = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One answer and what its tool gave."""

    call_id: str
    thought: str
    text: str
    arguments: dict[str, Any]
    result: str


class Conversation:
    def __init__(self, *, seed: int, num_turns: int, result_chars: int) -> None:
        self._random = random.Random(seed)
        self.system = self._text(_FIRST_CHARS // 4)
        self.task = self._text(2_000)
        self.tools = [self._tool(k) for k in range(24)]
        self.steps = [self._step(k, result_chars) for k in range(num_turns - 1)]
        self.shapes: dict[str, Callable[[int], bytes]] = {
            "claude": self.claude,
            "codex": self.codex,
            "chat": self.chat,
        }

    def chat(self, n: int) -> bytes:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.task},
        ]
        for step in self.steps[: n - 1]:
            function = {"name": "tool_1", "arguments": json.dumps(step.arguments)}
            call = {"id": step.call_id, "type": "function", "function": function}
            messages += [
                {
                    "role": "assistant",
                    "content": step.text,
                    "reasoning_content": step.thought,
                    "tool_calls": [call],
                },
                {"role": "tool", "tool_call_id": step.call_id, "content": step.result},
            ]
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        return _json({"model": "policy", "messages": messages, "tools": tools, "stream": True})

    def claude(self, n: int) -> bytes:
        """Metadata at the head changes; `cache_control` stands at the newest block."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": [_block(self.task)]}]
        for step in self.steps[: n - 1]:
            call = {"type": "tool_use", "id": step.call_id, "name": "tool_1"}
            thought = {"type": "thinking", "thinking": step.thought, "signature": step.call_id * 9}
            answer = [thought, _block(step.text), {**call, "input": step.arguments}]
            result = {"type": "tool_result", "tool_use_id": step.call_id}
            result["content"] = step.result
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": [result]},
            ]
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        head = {"user_id": f"user_{n * 7919 % 1000}", "turn": "x" * (n % 13)}
        system = [{**_block(self.system), "cache_control": {"type": "ephemeral"}}]
        body = {"metadata": head, "model": "policy", "system": system, "messages": messages}
        tools = [
            {**tool, "input_schema": tool["parameters"], "parameters": None} for tool in self.tools
        ]
        return _json({**body, "tools": tools, "max_tokens": 32_000, "stream": True})

    def codex(self, n: int) -> bytes:
        """Items, encrypted reasoning, metadata whose keys come in another order each time."""
        items: list[dict[str, Any]] = [_said("developer", self.system), _said("user", self.task)]
        for step in self.steps[: n - 1]:
            call = {"type": "function_call", "call_id": step.call_id, "name": "tool_1"}
            output = {"type": "function_call_output", "call_id": step.call_id}
            items += [
                {"type": "reasoning", "summary": [], "encrypted_content": step.thought},
                _said("assistant", step.text),
                {**call, "arguments": json.dumps(step.arguments)},
                {**output, "output": step.result},
            ]
        names = ["thread", "session", "window", f"turn_{n}"]
        random.Random(n).shuffle(names)
        head = {"model": "policy", "client_metadata": {name: name * 5 for name in names}}
        tools = [{"type": "function", **tool} for tool in self.tools]
        body = {**head, "input": items, "tools": tools, "prompt_cache_key": "thread-1"}
        return _json({**body, "stream": True, "store": False, "turn": n})

    def _step(self, k: int, result_chars: int) -> Step:
        size = self._random.randint(result_chars // 4, result_chars * 7 // 4)
        return Step(
            call_id=f"call_{k:05d}",
            thought=self._text(600),
            text=self._text(150),
            arguments={"command": self._text(200), "path": f"/{self._word()}", "n": 5000.0},
            result=self._text(size),
        )

    def _tool(self, k: int) -> dict[str, Any]:
        fields = {self._word(): {"type": "string"} for _ in range(6)}
        size = _FIRST_CHARS * 3 // 4 // 24
        schema = {"type": "object", "properties": fields}
        return {"name": f"tool_{k}", "description": self._text(size), "parameters": schema}

    def _text(self, num_chars: int) -> str:
        words, size = [], 0
        while size < num_chars:
            words.append(self._word())
            size += len(words[-1]) + 1
        return " ".join(words)

    def _word(self) -> str:
        kind = self._random.random()
        word = "".join(
            self._random.choices(_LETTERS, weights=_WEIGHTS, k=self._random.randint(2, 9))
        )
        if kind < 0.1:
            return f"\n    {word}({self._random.randint(0, 99_999)})"
        return f'"{word}": {{' if kind < 0.15 else word


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


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
