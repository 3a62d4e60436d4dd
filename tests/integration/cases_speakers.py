"""Three protocols as a harness speaks them: one conversation to bodies, answers back to one shape.

Written from the vendors' protocols, not from our dialects. Reading is strict: a stream that
breaks its protocol's grammar, or an event that the vendor's own typed models refuse, fails.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import anthropic.types as claude
import openai.types.chat as chat
import openai.types.responses as responses
from pydantic import TypeAdapter

Json = dict[str, Any]
Event = tuple[str, Any]
"""Name ("" if it has none) and data, decoded; of `[DONE]` the text."""

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "timeout": {"type": "number"},
        "deep": {"type": "object"},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer as its client got it. `sent_back` is it in the protocol's own form."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    ending: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    sent_back: Any = None

    @property
    def said(self) -> tuple[str, str, tuple[tuple[str, str], ...], str]:
        """All that is the model's, without ids and counts."""
        called = tuple((call.name, call.arguments) for call in self.calls)
        return self.text, self.thinking, called, self.ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """`role`: system or user."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An earlier answer as the harness sends it back, in the protocol's own form."""

    form: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of calls in the order in which the harness gives them: (call id, text)."""

    pairs: tuple[tuple[str, str], ...]


Entry = Said | Answered | Results
ToolSpec = tuple[str, Json]
BASH: ToolSpec = ("bash", SCHEMA)


class Speaker(Protocol):
    name: str
    operation: str

    def body(self, history: list[Entry], *, stream: bool, tools: tuple[ToolSpec, ...]) -> Json: ...

    def whole(self, data: Json) -> Reply: ...

    def streamed(self, events: list[Event]) -> Reply: ...

    def error_kind(self, data: Json) -> str:
        """Of an error body, whose shape is checked."""
        ...

    def as_harness(self, form: Any) -> Any:
        """An answer as the program of this protocol sends it back (measured)."""
        ...

    def with_values(self, form: Any, change: Callable[[Any], Any]) -> Any:
        """An answer whose call arguments are `change` of the parsed ones."""
        ...


class Chat:
    """OpenAI chat completions; sends back as qwen-code does."""

    name = "openai-chat"
    operation = "chat/completions"

    def body(self, history: list[Entry], *, stream: bool, tools: tuple[ToolSpec, ...]) -> Json:
        messages: list[Json] = []
        for one in history:
            match one:
                case Said(role=role, text=text):
                    messages.append({"role": role, "content": text})
                case Answered(form=form):
                    messages += [form] if form is not None else []
                case Results(pairs=pairs):
                    messages += [
                        {"role": "tool", "tool_call_id": call_id, "content": text}
                        for call_id, text in pairs
                    ]
        told = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in tools
        ]
        body: Json = {"model": "policy", "messages": messages, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        return body | ({"tools": told} if told else {})

    def whole(self, data: Json) -> Reply:
        chat.ChatCompletion.model_validate(data, strict=True)
        assert data["object"] == "chat.completion"
        (choice,) = data["choices"]
        return self._reply(choice["message"], choice["finish_reason"], data["usage"])

    def streamed(self, events: list[Event]) -> Reply:
        assert events[-1] == ("", "[DONE]")
        chunks = [data for _, data in events[:-1]]
        for chunk in chunks:
            chat.ChatCompletionChunk.model_validate(chunk, strict=True)
            assert chunk["object"] == "chat.completion.chunk"
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        usage = chunks.pop()
        assert usage["choices"] == []
        assert all(not chunk.get("usage") for chunk in chunks)
        return self._joined([chunk["choices"][0] for chunk in chunks], usage["usage"])

    def error_kind(self, data: Json) -> str:
        assert set(data["error"]) == {"message", "type", "param", "code"}
        return str(data["error"]["type"])

    def as_harness(self, form: Json) -> Json:
        """Trimmed reasoning, compact arguments, null for no text."""
        sent = self.with_values(form, lambda value: value)
        sent["content"] = sent.get("content") or None
        if sent.get("reasoning_content"):
            sent["reasoning_content"] = sent["reasoning_content"].strip()
        return sent

    def with_values(self, form: Json, change: Callable[[Any], Any]) -> Json:
        sent: Json = json.loads(json.dumps(form))
        for call in sent.get("tool_calls") or []:
            value = parsed(call["function"]["arguments"])
            if value is not None:
                call["function"]["arguments"] = compact(change(value))
        return sent

    def _joined(self, choices: list[Json], usage: Json) -> Reply:
        assert choices[0]["delta"]["role"] == "assistant"
        ends = [choice["finish_reason"] for choice in choices]
        assert ends[-1]
        assert not any(ends[:-1])
        message: Json = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: list[Json] = []
        for choice in choices:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or []:
                self._grow(calls, part)
        return self._reply(message | ({"tool_calls": calls} if calls else {}), ends[-1], usage)

    def _grow(self, calls: list[Json], part: Json) -> None:
        function = part["function"]
        if part["index"] == len(calls):
            assert part["type"] == "function"
            assert part["id"]
            begun = {"name": function["name"], "arguments": function.get("arguments") or ""}
            calls.append({"id": part["id"], "type": "function", "function": begun})
            return
        assert part["index"] == len(calls) - 1, "calls are interleaved"
        assert not part.get("id")
        assert not function.get("name")
        calls[-1]["function"]["arguments"] += function["arguments"]

    def _reply(self, message: Json, finish: str, usage: Json) -> Reply:
        num_in, num_out = usage["prompt_tokens"], usage["completion_tokens"]
        assert usage["total_tokens"] == num_in + num_out
        calls = tuple(
            ToolCall(
                call_id=call["id"],
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
            )
            for call in message.get("tool_calls") or []
        )
        return Reply(
            text=message.get("content") or "",
            thinking=message.get("reasoning_content") or "",
            calls=calls,
            ending={"tool_calls": "calls"}.get(finish, finish),
            num_prompt_tokens=num_in,
            num_completion_tokens=num_out,
            sent_back=message,
        )


_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(responses.ResponseStreamEvent)


class Responses:
    """OpenAI Responses; sends back as Codex does."""

    name = "openai-responses"
    operation = "responses"

    def body(self, history: list[Entry], *, stream: bool, tools: tuple[ToolSpec, ...]) -> Json:
        items: list[Json] = []
        for one in history:
            match one:
                case Said(role=role, text=text):
                    part = {"type": "input_text", "text": text}
                    told = "developer" if role == "system" else role
                    items.append({"type": "message", "role": told, "content": [part]})
                case Answered(form=form):
                    items += form or []
                case Results(pairs=pairs):
                    items += [
                        {"type": "function_call_output", "call_id": call_id, "output": text}
                        for call_id, text in pairs
                    ]
        functions = [
            {"type": "function", "name": name, "parameters": schema, "strict": False}
            for name, schema in tools
        ]
        body: Json = {"model": "policy", "input": items, "stream": stream, "store": False}
        body["include"] = ["reasoning.encrypted_content"]
        return body | ({"tools": functions} if functions else {})

    def whole(self, data: Json) -> Reply:
        responses.Response.model_validate(data)
        assert data["object"] == "response"
        return self._reply(data)

    def streamed(self, events: list[Event]) -> Reply:
        for number, (name, data) in enumerate(events):
            _RESPONSE_EVENT.validate_python(data)
            assert name == data["type"]
            assert data["sequence_number"] == number
        kinds = [name.removeprefix("response.") for name, _ in events]
        assert kinds[:2] == ["created", "in_progress"]
        assert kinds[-1] in ("completed", "incomplete")
        assert not {"completed", "incomplete", "failed"} & set(kinds[:-1])
        response = events[-1][1]["response"]
        assert response["id"] == events[0][1]["response"]["id"]
        self._check_items([data for _, data in events[2:-1]], response["output"])
        return self._reply(response)

    def error_kind(self, data: Json) -> str:
        assert set(data["error"]) == {"message", "type", "param", "code"}
        return str(data["error"]["type"])

    def as_harness(self, form: list[Json]) -> list[Json]:
        """Ids of items are dropped, what was sealed stays sealed, arguments are as they were."""
        sent = []
        for item in form:
            kept = {key: value for key, value in item.items() if key not in ("id", "status")}
            if item["type"] == "reasoning":
                kept = {**kept, "content": None}
            sent.append(kept)
        return sent

    def with_values(self, form: list[Json], change: Callable[[Any], Any]) -> list[Json]:
        sent: list[Json] = json.loads(json.dumps(form))
        for item in sent:
            value = parsed(item["arguments"]) if item["type"] == "function_call" else None
            if value is not None:
                item["arguments"] = compact(change(value))
        return sent

    def _check_items(self, events: list[Json], output: list[Json]) -> None:
        """Items come one after the other; the deltas of each join to what its end says."""
        rest = list(events)
        for index, item in enumerate(output):
            size = next(k for k, e in enumerate(rest) if e["type"].endswith("output_item.done"))
            mine, rest = rest[: size + 1], rest[size + 1 :]
            assert {event["output_index"] for event in mine} == {index}
            assert mine[0]["type"] == "response.output_item.added"
            assert mine[0]["item"]["id"] == item["id"]
            assert mine[-1]["item"] == item
            deltas = "".join(e["delta"] for e in mine if e["type"].endswith(".delta"))
            assert deltas == self._text_of(item)
            assert {e["item_id"] for e in mine[1:-1]} == {item["id"]}
        assert rest == []

    def _text_of(self, item: Json) -> str:
        if item["type"] == "function_call":
            return str(item["arguments"])
        parts = item.get("content") or item.get("summary") or []
        return "".join(part["text"] for part in parts)

    def _reply(self, response: Json) -> Reply:
        usage, output = response["usage"], response["output"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        calls = tuple(
            ToolCall(call_id=item["call_id"], name=item["name"], arguments=item["arguments"])
            for item in output
            if item["type"] == "function_call"
        )
        texts = {
            kind: "".join(self._text_of(item) for item in output if item["type"] == kind)
            for kind in ("message", "reasoning")
        }
        ending = "length" if response["status"] == "incomplete" else "calls" if calls else "stop"
        return Reply(
            text=texts["message"],
            thinking=texts["reasoning"],
            calls=calls,
            ending=ending,
            num_prompt_tokens=usage["input_tokens"],
            num_completion_tokens=usage["output_tokens"],
            sent_back=output,
        )


_CLAUDE_EVENT: TypeAdapter[Any] = TypeAdapter(claude.RawMessageStreamEvent)
_UNPARSED = "__unparsedToolInput"


@dataclass(slots=True)
class _Block:
    block: Json
    parts: list[str] = field(default_factory=list)


class Messages:
    """Anthropic Messages; sends back as Claude Code does."""

    name = "anthropic"
    operation = "messages"

    def body(self, history: list[Entry], *, stream: bool, tools: tuple[ToolSpec, ...]) -> Json:
        """`cache_control` stands at the newest block."""
        messages: list[Json] = []
        system: list[Json] = []
        for one in history:
            match one:
                case Said(role="system", text=text):
                    system.append({"type": "text", "text": text})
                case Said(role=role, text=text):
                    messages.append({"role": role, "content": [{"type": "text", "text": text}]})
                case Answered(form=form):
                    messages.append({"role": "assistant", "content": form})
                case Results(pairs=pairs):
                    blocks = [
                        {"type": "tool_result", "tool_use_id": call_id, "content": text}
                        for call_id, text in pairs
                    ]
                    messages.append({"role": "user", "content": blocks})
        messages = json.loads(json.dumps(messages))
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        told = [{"name": name, "input_schema": schema} for name, schema in tools]
        body: Json = {"model": "policy", "messages": messages, "stream": stream}
        body |= {"max_tokens": 32_000, "thinking": {"type": "enabled", "budget_tokens": 31_999}}
        body |= {"system": system} if system else {}
        return body | ({"tools": told} if told else {})

    def whole(self, data: Json) -> Reply:
        claude.Message.model_validate(data, strict=True)
        return self._reply(data["content"], data, data["usage"])

    def streamed(self, events: list[Event]) -> Reply:
        for name, data in events:
            _CLAUDE_EVENT.validate_python(data)
            assert name == data["type"]
        kinds = [name for name, _ in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        start, end = events[0][1]["message"], events[-2][1]
        assert start["content"] == []
        blocks = self._blocks([data for _, data in events[1:-2] if data["type"] != "ping"])
        usage = {**start["usage"], **end["usage"]}
        return self._reply(blocks, end["delta"], usage)

    def error_kind(self, data: Json) -> str:
        assert data["type"] == "error"
        assert {"type", "message"} <= set(data["error"])
        return str(data["error"]["type"])

    def as_harness(self, form: list[Json]) -> list[Json]:
        """Inputs in the schema's order with 5000 for 5000.0; the rest verbatim."""
        return self.with_values(form, in_schema_order)

    def with_values(self, form: list[Json], change: Callable[[Any], Any]) -> list[Json]:
        sent: list[Json] = json.loads(json.dumps(form))
        for block in sent:
            if block["type"] == "tool_use" and _UNPARSED not in block["input"]:
                block["input"] = change(block["input"])
        return sent

    def _blocks(self, events: list[Json]) -> list[Json]:
        """Blocks one after the other; what Claude Code makes of their deltas."""
        blocks: list[Json] = []
        open_: _Block | None = None
        for event in events:
            match event["type"]:
                case "content_block_start":
                    assert open_ is None, "blocks are interleaved"
                    assert event["index"] == len(blocks)
                    open_ = _Block(dict(event["content_block"]))
                case "content_block_delta":
                    assert open_ is not None
                    assert event["index"] == len(blocks)
                    self._grow(open_, event["delta"])
                case "content_block_stop":
                    assert open_ is not None
                    assert event["index"] == len(blocks)
                    blocks.append(self._finished(open_))
                    open_ = None
                case other:
                    raise AssertionError(f"{other} between the blocks")
        assert open_ is None, "a block was not stopped"
        return blocks

    def _grow(self, one: _Block, delta: Json) -> None:
        match one.block["type"], delta["type"]:
            case "text", "text_delta":
                one.block["text"] += delta["text"]
            case "thinking", "thinking_delta":
                assert not one.block["signature"], "thinking after its signature"
                one.block["thinking"] += delta["thinking"]
            case "thinking", "signature_delta":
                one.block["signature"] += delta["signature"]
            case "tool_use", "input_json_delta":
                one.parts.append(delta["partial_json"])
            case other:
                raise AssertionError(f"a delta of another kind: {other}")

    def _finished(self, one: _Block) -> Json:
        if one.block["type"] == "thinking":
            assert one.block["signature"], "thinking without a signature"
        if one.block["type"] == "tool_use":
            raw = "".join(one.parts)
            value = parsed(raw) if raw else {}
            is_object = isinstance(value, dict)
            wrapped = {_UNPARSED: {"raw": raw, "len": len(raw)}}
            one.block["input"] = value if is_object else wrapped
            one.block["raw"] = raw
        return one.block

    def _reply(self, blocks: list[Json], end: Json, usage: Json) -> Reply:
        calls = tuple(
            ToolCall(
                call_id=block["id"],
                name=block["name"],
                arguments=block.pop("raw", None) or self._raw_of(block["input"]),
            )
            for block in blocks
            if block["type"] == "tool_use"
        )
        endings = {"end_turn": "stop", "max_tokens": "length", "tool_use": "calls"}
        num_cached = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
        return Reply(
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            thinking="".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
            calls=calls,
            ending=endings.get(end["stop_reason"], end["stop_reason"]),
            num_prompt_tokens=usage["input_tokens"] + num_cached,
            num_completion_tokens=usage["output_tokens"],
            sent_back=blocks,
        )

    def _raw_of(self, given: Json) -> str:
        return (
            str(given[_UNPARSED]["raw"])
            if _UNPARSED in given
            else json.dumps(given, ensure_ascii=False)
        )


SPEAKERS: tuple[Speaker, ...] = (Chat(), Responses(), Messages())


def parsed(arguments: str) -> Any:
    """As JavaScript parses it; None for what it cannot."""
    try:
        return json.loads(arguments, parse_float=_number, parse_constant=_no_constant)
    except ValueError:
        return None


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def in_schema_order(value: Any) -> Any:
    """Known keys first, in the order of their schema."""
    if not isinstance(value, dict):
        return value
    known = [key for key in SCHEMA["properties"] if key in value]
    return {key: value[key] for key in [*known, *(k for k in value if k not in known)]}


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1e21 else value


def _no_constant(text: str) -> Any:
    raise ValueError(text)
