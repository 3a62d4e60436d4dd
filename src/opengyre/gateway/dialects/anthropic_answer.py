"""One answer in Anthropic's form: a message in whole, or its events.

Must not know: HTTP, sessions, tokens. Invariants: a stream is message_start, blocks one after the
other with ascending indexes, message_delta, message_stop; a thinking block ends with its signature;
a call's input goes out as it is sampled.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, assert_never

import msgspec

from opengyre.gateway.dialects.anthropic_content import input_json, sign
from opengyre.gateway.request import (
    Answer,
    CallEnd,
    CallPiece,
    CallStart,
    Ending,
    Piece,
    ReasoningPiece,
    TextPiece,
    TokenLogprob,
)

_json = msgspec.json.Encoder()
_STOP_REASONS = {
    Ending.STOP: "end_turn",
    Ending.LENGTH: "max_tokens",
    Ending.CALLS: "tool_use",
    Ending.STOP_STRING: "stop_sequence",
}
_EMPTY_TEXT = {"type": "text", "text": ""}
_EMPTY_THINKING = {"type": "thinking", "thinking": "", "signature": ""}


class Display(Enum):
    """What a client sees of thinking: all, only that it was, or nothing."""

    SHOWN = auto()
    OMITTED = auto()
    HIDDEN = auto()


class _Open(Enum):
    NOTHING = auto()
    TEXT = auto()
    THINKING = auto()


class MessageAnswer:
    """The AnswerForm of a message. It remembers which blocks it opened."""

    def __init__(self, *, message_id: str, model: str, display: Display) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._display = display
        self._num_blocks = 0
        self._open = _Open.NOTHING
        self._thoughts: list[str] = []
        self._block_by_call: dict[int, int] = {}

    def whole(self, answer: Answer) -> bytes:
        content: list[dict[str, Any]] = []
        message = answer.message
        if message.reasoning and self._display is not Display.HIDDEN:
            shown = message.reasoning if self._display is Display.SHOWN else ""
            signature = sign(message.reasoning)
            content.append({"type": "thinking", "thinking": shown, "signature": signature})
        if message.text:
            content.append({"type": "text", "text": message.text})
        for call in message.calls:
            told = {"id": call.call_id, "name": call.name, "input": input_json(call.arguments)}
            content.append({"type": "tool_use", **told})
        usage = _usage(answer.usage.num_prompt_tokens, answer.usage.num_completion_tokens)
        return _json.encode({**self._head, "content": content, **_ending(answer), "usage": usage})

    def opening(self, num_prompt_tokens: int) -> bytes:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": _usage(num_prompt_tokens, 0)}
        return _event("message_start", message=message)

    def delta(self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return b"".join(self._piece(piece) for piece in pieces)

    def closing(self, answer: Answer) -> bytes:
        ends = [self._close(), *(_stop(block) for block in self._block_by_call.values())]
        usage = _usage(answer.usage.num_prompt_tokens, answer.usage.num_completion_tokens)
        ends.append(_event("message_delta", delta=_ending(answer), usage=usage))
        return b"".join(ends) + _event("message_stop")

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case TextPiece(text=text):
                opened = self._enter(_Open.TEXT, _EMPTY_TEXT)
                return opened + self._add({"type": "text_delta", "text": text})
            case ReasoningPiece(text=text):
                return self._think(text)
            case CallStart(index=index, call_id=call_id, name=name):
                closed = self._close()
                self._block_by_call[index] = self._num_blocks
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return closed + self._start(block)
            case CallPiece(index=index, text=text):
                part = {"type": "input_json_delta", "partial_json": text}
                return _event("content_block_delta", index=self._block_by_call[index], delta=part)
            case CallEnd(index=index):
                return _stop(self._block_by_call.pop(index))
        assert_never(piece)

    def _think(self, text: str) -> bytes:
        if self._display is Display.HIDDEN:
            return b""
        opened = self._enter(_Open.THINKING, _EMPTY_THINKING)
        self._thoughts.append(text)
        if self._display is Display.OMITTED:
            return opened
        return opened + self._add({"type": "thinking_delta", "thinking": text})

    def _enter(self, kind: _Open, block: dict[str, Any]) -> bytes:
        if self._open is kind:
            return b""
        closed = self._close()
        self._open = kind
        return closed + self._start(block)

    def _close(self) -> bytes:
        """End the block of text or thinking that is open, if one is."""
        was, self._open = self._open, _Open.NOTHING
        if was is _Open.NOTHING:
            return b""
        end = _stop(self._num_blocks - 1)
        if was is _Open.TEXT:
            return end
        thinking, self._thoughts = "".join(self._thoughts), []
        return self._add({"type": "signature_delta", "signature": sign(thinking)}) + end

    def _start(self, block: dict[str, Any]) -> bytes:
        index = self._num_blocks
        self._num_blocks += 1
        return _event("content_block_start", index=index, content_block=block)

    def _add(self, part: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=part)


def _stop(index: int) -> bytes:
    return _event("content_block_stop", index=index)


def _ending(answer: Answer) -> dict[str, Any]:
    is_stop_string = answer.ending is Ending.STOP_STRING
    return {
        "stop_reason": _STOP_REASONS[answer.ending],
        "stop_sequence": answer.stop_string if is_stop_string else None,
    }


def _usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """All of the prompt counts as input: what an engine had cached is not told apart."""
    return {
        "input_tokens": num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    data = _json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
