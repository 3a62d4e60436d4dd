"""Sampled ids to answer pieces as they come, for formats with `<think>` and `<tool_call>` markers.

Owns: the phases of an answer. Must not know: engines, dialects. Invariants: the pieces do not
depend on how the ids were split; a call that is not valid JSON is never repaired: its client gets
the raw block as the arguments, or as text if it has no name.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from opengyre.gateway.detokenize import TextDecoder
from opengyre.gateway.request import (
    Call,
    CallPiece,
    Ending,
    Message,
    Piece,
    ReasoningPiece,
    Role,
    TextPiece,
)
from opengyre.gateway.visible import VisibleText

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """The marker ids of a family and its vocabulary as bytes."""

    think: int
    think_end: int
    call: int
    call_end: int
    stops: frozenset[int]
    table: list[bytes]


class _Phase(Enum):
    START = auto()
    REASONING = auto()
    MAYBE_CALL = auto()  # a call marker inside reasoning: a draft if </think> still comes
    TEXT = auto()
    CALL = auto()
    AFTER_CALL = auto()
    DONE = auto()


class AnswerParser:
    """One answer. `feed` gives pieces one id at a time; `finish` gives the rest.

    `call_id(index)` names the calls. After `is_stopped` (a stop id or stop string) no more ids
    are wanted.
    """

    def __init__(
        self, markers: Markers, *, stops: tuple[str, ...], call_id: Callable[[int], str]
    ) -> None:
        self._markers = markers
        self._call_id = call_id
        self._decoder = TextDecoder(markers.table)
        self._phase = _Phase.START
        self._visible = VisibleText(stops)
        self._thoughts = VisibleText()
        self._raw = ""
        self._shown: list[str] = []
        self._reasoned: list[str] = []
        self._calls: list[Call] = []

    @property
    def is_stopped(self) -> bool:
        return self._phase is _Phase.DONE or self._visible.is_stopped

    @property
    def is_stop_string(self) -> bool:
        """Its text came to a stop string: the engine does not know, and must be stopped."""
        return self._visible.is_stopped

    def message(self) -> Message:
        """What the client got so far."""
        return Message(
            role=Role.ASSISTANT,
            text="".join(self._shown),
            reasoning="".join(self._reasoned) or None,
            calls=tuple(self._calls),
        )

    def ending(self, *, is_cut: bool) -> Ending:
        if is_cut:
            return Ending.LENGTH
        return Ending.CALLS if self._calls else Ending.STOP

    def feed(self, token: int) -> list[Piece]:
        if self.is_stopped:
            return []
        if token in self._markers.stops:
            return self.finish()
        match self._phase:
            case _Phase.START:
                return self._start(token)
            case _Phase.REASONING:
                return self._reason(token)
            case _Phase.MAYBE_CALL:
                return self._draft(token)
            case _Phase.TEXT | _Phase.AFTER_CALL:
                return self._write(token)
            case _:
                return self._collect(token)

    def finish(self) -> list[Piece]:
        """No more ids: everything held back comes out."""
        rest = self._decoder.flush()
        phase, self._phase = self._phase, _Phase.DONE
        match phase:
            case _Phase.START | _Phase.TEXT:
                return self._text(rest, is_end=True)
            case _Phase.REASONING:
                return self._thought(rest, is_end=True)
            case _Phase.CALL:
                return self._close_call(rest, is_whole=False)
            case _Phase.MAYBE_CALL:
                return self._thought("", is_end=True) + self._drafted_calls(rest)
            case _:
                return []

    def _start(self, token: int) -> list[Piece]:
        if token == self._markers.think:
            self._visible.feed(self._decoder.flush())
            self._phase = _Phase.REASONING
            return []
        if token == self._markers.call:
            return self._write(token)
        text = self._decoder.feed(token)
        if text.strip():
            self._phase = _Phase.TEXT
        return self._text(text)

    def _reason(self, token: int) -> list[Piece]:
        if token == self._markers.think_end:
            return self._end_reasoning()
        if token == self._markers.call:
            pieces = self._thought(self._decoder.flush())
            self._raw = ""
            self._phase = _Phase.MAYBE_CALL
            return pieces
        if token == self._markers.think:
            return []
        return self._thought(self._decoder.feed(token))

    def _draft(self, token: int) -> list[Piece]:
        if token == self._markers.think_end:
            drafted = "<tool_call>" + self._raw
            self._raw = ""
            return self._thought(drafted) + self._end_reasoning()
        self._raw += self._decoder.feed(token)
        return []

    def _end_reasoning(self) -> list[Piece]:
        self._phase = _Phase.TEXT
        return self._thought(self._decoder.flush(), is_end=True)

    def _write(self, token: int) -> list[Piece]:
        if token == self._markers.call:
            is_first = self._phase is not _Phase.AFTER_CALL
            rest = self._decoder.flush()
            self._phase, self._raw = _Phase.CALL, ""
            return self._text(rest, is_end=True) if is_first else []
        text = self._decoder.feed(token)
        return [] if self._phase is _Phase.AFTER_CALL else self._text(text)

    def _collect(self, token: int) -> list[Piece]:
        if token == self._markers.call_end:
            self._phase = _Phase.AFTER_CALL
            return self._close_call(self._decoder.flush(), is_whole=True)
        self._raw += self._decoder.feed(token)
        return []

    def _close_call(self, rest: str, *, is_whole: bool) -> list[Piece]:
        raw, self._raw = self._raw + rest, ""
        read = read_call(raw.strip()) if is_whole else None
        name = _NAME.search(raw) if read is None else None
        if name is not None:
            read = (name.group(1), raw.strip())
        if read is None:
            return self._show("<tool_call>" + raw + ("</tool_call>" if is_whole else ""))
        call = Call(call_id=self._call_id(len(self._calls)), name=read[0], arguments=read[1])
        self._calls.append(call)
        return [CallPiece(index=len(self._calls) - 1, call=call)]

    def _drafted_calls(self, rest: str) -> list[Piece]:
        """Reasoning that only a call ended: what followed was the answer after all."""
        pieces: list[Piece] = []
        blocks = (self._raw + rest).split("<tool_call>")
        for block in blocks:
            self._raw, end, _ = block.partition("</tool_call>")
            pieces += self._close_call("", is_whole=bool(end))
        return pieces

    def _text(self, text: str, *, is_end: bool = False) -> list[Piece]:
        shown = self._visible.feed(text)
        return self._show(shown + self._visible.flush() if is_end else shown)

    def _show(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._shown.append(text)
        return [TextPiece(text=text)]

    def _thought(self, text: str, *, is_end: bool = False) -> list[Piece]:
        shown = self._thoughts.feed(text)
        shown = shown + self._thoughts.flush() if is_end else shown
        if not shown:
            return []
        self._reasoned.append(shown)
        return [ReasoningPiece(text=shown)]


def read_call(raw: str) -> tuple[str, str] | None:
    """(name, arguments exactly as written) of a whole call; None if it is not one."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return name, arguments
    return name, _member(raw, "arguments") or json.dumps(arguments, ensure_ascii=False)


def _member(raw: str, wanted: str) -> str | None:
    """The source text of a member of the valid JSON object `raw`; the last one counts."""
    decoder: Any = json.JSONDecoder()
    blank = re.compile(r"[\s,]*")
    found, at = None, raw.index("{") + 1
    while (at := _after(blank, raw, at)) < len(raw) and raw[at] != "}":
        key, at = decoder.raw_decode(raw, at)
        start = _after(blank, raw, _after(blank, raw, at) + 1)
        _, at = decoder.raw_decode(raw, start)
        found = raw[start:at] if key == wanted else found
    return found


def _after(blank: re.Pattern[str], raw: str, at: int) -> int:
    match = blank.match(raw, at)
    return match.end() if match else at
