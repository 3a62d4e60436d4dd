"""One answer as a Response: whole, or as the events that build it.

Owns: output items and their events. Must not know: what requests mean, sessions, tokens.
Invariants: the deltas of an item join to what its end says; sequence numbers count all events; the
response in the terminal event is the one that an unstreamed call gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import msgspec

from opengyre.gateway.dialects.responses_items import RAW_CUSTOM_CALL, seal
from opengyre.gateway.dialects.responses_tools import ToolTable, custom_input
from opengyre.gateway.request import (
    Answer,
    Call,
    CallEnd,
    CallPiece,
    CallStart,
    Ending,
    Piece,
    ReasoningPiece,
    TextPiece,
    TokenLogprob,
    Usage,
)

_json = msgspec.json.Encoder()
_Event = dict[str, Any]
_OPENING = ("response.created", "response.in_progress")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grammar:
    """How an item of a kind is told. Its text is `holder` of the item, or in a part there."""

    kind: str
    prefix: str
    events: str
    text: str
    holder: str
    part: str = ""
    part_events: str = ""
    part_index: str = ""


_MESSAGE = _Grammar(
    kind="message",
    prefix="msg",
    events="response.output_text",
    text="text",
    holder="content",
    part="output_text",
    part_events="response.content_part",
    part_index="content_index",
)
_REASONING = _Grammar(
    kind="reasoning",
    prefix="rs",
    events="response.reasoning_text",
    text="text",
    holder="content",
    part="reasoning_text",
    part_events="response.content_part",
    part_index="content_index",
)
_SUMMARY = _Grammar(
    kind="reasoning",
    prefix="rs",
    events="response.reasoning_summary_text",
    text="text",
    holder="summary",
    part="summary_text",
    part_events="response.reasoning_summary_part",
    part_index="summary_index",
)
_FUNCTION = _Grammar(
    kind="function_call",
    prefix="fc",
    events="response.function_call_arguments",
    text="arguments",
    holder="arguments",
)
_CUSTOM = _Grammar(
    kind="custom_tool_call",
    prefix="ctc",
    events="response.custom_tool_call_input",
    text="input",
    holder="input",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What a request says of its answer. `stem` makes the ids; `echo` repeats its settings.

    Reasoning is told as a summary if one was asked for, else as content; `is_sealed` gives it
    sealed besides.
    """

    stem: str
    created_s: int
    echo: dict[str, Any]
    table: ToolTable
    is_sealed: bool
    is_summary: bool


@dataclass(slots=True, kw_only=True)
class _Item:
    """An item while it grows; `fields` of it and `head` of its events do not change."""

    grammar: _Grammar
    index: int
    fields: dict[str, Any]
    head: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def event(self, stage: str, **more: Any) -> _Event:
        """Of the item's text."""
        return {"type": f"{self.grammar.events}.{stage}", **self.head, **more}

    def part_events(self, stage: str, text: str) -> list[_Event]:
        if not self.grammar.part:
            return []
        name = f"{self.grammar.part_events}.{stage}"
        return [{"type": name, **self.head, "part": self._part(text)}]

    def as_of(self, text: str, status: str) -> dict[str, Any]:
        """The item with `text` in it; "" is what it is before its first part."""
        grammar = self.grammar
        value: Any = text
        if grammar.part:
            value = [self._part(text)] if text else []
        has_status = grammar.kind in ("message", "function_call")
        return {**self.fields, grammar.holder: value} | ({"status": status} if has_status else {})

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.grammar.part, "text": text}
        if self.grammar is _MESSAGE:
            part |= {"annotations": [], "logprobs": list(self.logprobs)}
        return part


class ResponsesAnswer:
    """The AnswerForm of a Response."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._output: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._num_events = len(_OPENING)

    def whole(self, answer: Answer) -> bytes:
        self.delta(_pieces(answer), answer.logprobs)
        self._close(_status(answer))
        return _json.encode(self._ended(answer))

    def opening(self, num_prompt_tokens: int) -> bytes:
        begun = self._response("in_progress", [], usage=None)
        events = [{"type": name, "response": begun} for name in _OPENING]
        return b"".join(_written(event, number) for number, event in enumerate(events))

    def delta(self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """`logprobs` go with the next text; those of what is no text before it as well."""
        self._logprobs += [_logprob_json(one) for one in logprobs]
        return self._numbered([event for piece in pieces for event in self._take(piece)])

    def closing(self, answer: Answer) -> bytes:
        status = _status(answer)
        events = self._close(status)
        terminal = {"type": f"response.{status}", "response": self._ended(answer)}
        return self._numbered([*events, terminal])

    def _take(self, piece: Piece) -> list[_Event]:
        match piece:
            case ReasoningPiece(text=text):
                grammar = _SUMMARY if self._shape.is_summary else _REASONING
                return self._write(grammar, text)
            case TextPiece(text=text):
                return self._write(_MESSAGE, text)
            case CallStart(call_id=call_id, name=name):
                is_custom = self._shape.table.client(name).is_custom
                closed = self._close()
                return closed if is_custom else closed + self._open_call(_FUNCTION, call_id, name)
            case CallPiece(text=text):
                return self._grow(text)
            case CallEnd(call=call):
                return self._end_call(call)
            case _ as unreachable:
                assert_never(unreachable)

    def _write(self, grammar: _Grammar, text: str) -> list[_Event]:
        events: list[_Event] = []
        if self._item is None or self._item.grammar is not grammar:
            more: dict[str, Any] = {"role": "assistant"} if grammar is _MESSAGE else {"summary": []}
            events = self._close() + self._open(grammar, grammar.prefix, more)
        return events + self._grow(text)

    def _end_call(self, call: Call) -> list[_Event]:
        """A custom call is told only now: what its input is shows at its end."""
        if self._item is not None:
            return self._close()
        text = custom_input(call.arguments)
        events = self._open_call(_CUSTOM, call.call_id, call.name, is_raw=text is None)
        return events + self._grow(call.arguments if text is None else text) + self._close()

    def _open_call(
        self, grammar: _Grammar, call_id: str, shown: str, *, is_raw: bool = False
    ) -> list[_Event]:
        client = self._shape.table.client(shown)
        more = {"call_id": call_id, "name": client.name}
        if client.namespace:
            more["namespace"] = client.namespace
        return self._open(grammar, RAW_CUSTOM_CALL if is_raw else grammar.prefix, more)

    def _open(self, grammar: _Grammar, prefix: str, more: dict[str, Any]) -> list[_Event]:
        index = len(self._output)
        fields = {"type": grammar.kind, "id": f"{prefix}_{self._shape.stem}_{index}", **more}
        head = {"item_id": fields["id"], "output_index": index}
        if grammar.part:
            head[grammar.part_index] = 0
        self._item = _Item(grammar=grammar, index=index, fields=fields, head=head)
        item = self._item.as_of("", "in_progress")
        added = {"type": "response.output_item.added", "output_index": index, "item": item}
        return [added, *self._item.part_events("added", "")]

    def _grow(self, text: str) -> list[_Event]:
        item = self._item
        if item is None or not text:
            return []
        item.texts.append(text)
        if item.grammar is not _MESSAGE:
            return [item.event("delta", delta=text)]
        told, self._logprobs = self._logprobs, []
        item.logprobs += told
        return [item.event("delta", delta=text, logprobs=told)]

    def _close(self, status: str = "completed") -> list[_Event]:
        """What ends the open item."""
        item = self._item
        if item is None:
            return []
        self._item = None
        text = "".join(item.texts)
        more = {"logprobs": item.logprobs} if item.grammar is _MESSAGE else {}
        done = item.event("done", **{item.grammar.text: text}, **more)
        whole = item.as_of(text, status)
        if item.grammar.kind == "reasoning" and self._shape.is_sealed:
            whole["encrypted_content"] = seal(text)
        self._output.append(whole)
        ended = {"type": "response.output_item.done", "output_index": item.index, "item": whole}
        return [done, *item.part_events("done", text), ended]

    def _ended(self, answer: Answer) -> dict[str, Any]:
        return self._response(_status(answer), self._output, usage=_usage_json(answer.usage))

    def _response(
        self, status: str, output: list[dict[str, Any]], *, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            "id": f"resp_{self._shape.stem}",
            "object": "response",
            "created_at": self._shape.created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": usage,
            **self._shape.echo,
        }

    def _numbered(self, events: list[_Event]) -> bytes:
        start = self._num_events
        self._num_events += len(events)
        return b"".join(_written(event, start + k) for k, event in enumerate(events))


def _written(event: _Event, number: int) -> bytes:
    data = _json.encode({**event, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


def _pieces(answer: Answer) -> list[Piece]:
    message = answer.message
    pieces: list[Piece] = [ReasoningPiece(text=message.reasoning)] if message.reasoning else []
    pieces += [TextPiece(text=message.text)] if message.text else []
    for k, call in enumerate(message.calls):
        pieces.append(CallStart(index=k, call_id=call.call_id, name=call.name))
        pieces.append(CallPiece(index=k, text=call.arguments))
        pieces.append(CallEnd(index=k, call=call))
    return pieces


def _status(answer: Answer) -> str:
    return "incomplete" if answer.ending is Ending.LENGTH else "completed"


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_reused_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _logprob_json(one: TokenLogprob) -> dict[str, Any]:
    data = list(one.data)
    return {"token": one.text, "bytes": data, "logprob": one.logprob, "top_logprobs": []}
