"""Sampled ids to answer pieces as they come, for formats with `<think>` and `<tool_call>` markers.

Owns: the phases of an answer. Must not know: engines, dialects. Invariants: the pieces do not
depend on how the ids were split; joined they are `message()`; a call's arguments come as they are
sampled and are never repaired; a block without a name is text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from opengyre.gateway.call_json import JsonCall
from opengyre.gateway.detokenize import TextDecoder
from opengyre.gateway.request import (
    Call,
    CallEnd,
    CallPiece,
    CallStart,
    Ending,
    Message,
    Piece,
    ReasoningPiece,
    Role,
    TextPiece,
)
from opengyre.gateway.visible import VisibleText


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

    `call_id(index)` names the calls. Unless `is_parallel` it ends after its first call. `forced`
    are ids of the prompt's end that already belong to the answer. After `is_stopped` no more ids
    are wanted; `is_ended_early` if the engine cannot know that and must be stopped.
    """

    def __init__(
        self,
        markers: Markers,
        *,
        stops: tuple[str, ...],
        call_id: Callable[[int], str],
        is_parallel: bool = True,
        forced: Sequence[int] = (),
    ) -> None:
        self._markers = markers
        self._name_call = call_id
        self._is_parallel = is_parallel
        self._decoder = TextDecoder(markers.table)
        self._phase = _Phase.START
        self._visible = VisibleText(stops)
        self._thoughts = VisibleText()
        self._draft: list[str] = []
        self._call = JsonCall()
        self._call_id = ""
        self._arguments: list[str] = []
        self._shown: list[str] = []
        self._reasoned: list[str] = []
        self._calls: list[Call] = []
        self._is_ended_early = False
        self._forced = [piece for token in forced for piece in self._read(token)]

    @property
    def is_stopped(self) -> bool:
        """A stop id, a stop string or the only call that was wanted."""
        return self._phase is _Phase.DONE or self._visible.is_stopped

    @property
    def is_ended_early(self) -> bool:
        return self._is_ended_early or self._visible.is_stopped

    @property
    def is_stop_string(self) -> bool:
        """Its text came to a stop string: the engine does not know, and must be stopped."""
        return self._visible.is_stopped

    @property
    def stop_string(self) -> str:
        """The stop string that its text came to, or ""."""
        return self._visible.stop

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
        if self._calls:
            return Ending.CALLS
        return Ending.STOP_STRING if self.stop_string else Ending.STOP

    def feed(self, token: int) -> list[Piece]:
        if self.is_stopped:
            return self._take_forced()
        if token in self._markers.stops:
            return self.finish()
        return self._take_forced() + self._read(token)

    def finish(self) -> list[Piece]:
        """No more ids: everything held back comes out."""
        return self._take_forced() + self._end()

    def _take_forced(self) -> list[Piece]:
        pieces, self._forced = self._forced, []
        return pieces

    def _read(self, token: int) -> list[Piece]:
        match self._phase:
            case _Phase.START:
                return self._start(token)
            case _Phase.REASONING:
                return self._reason(token)
            case _Phase.MAYBE_CALL:
                return self._draft_call(token)
            case _Phase.TEXT | _Phase.AFTER_CALL:
                return self._write(token)
            case _:
                return self._collect(token)

    def _end(self) -> list[Piece]:
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
            self._phase = _Phase.MAYBE_CALL
            return pieces
        if token == self._markers.think:
            return []
        return self._thought(self._decoder.feed(token))

    def _draft_call(self, token: int) -> list[Piece]:
        if token == self._markers.think_end:
            drafted = "<tool_call>" + "".join([*self._draft, self._decoder.flush()])
            self._draft = []
            return self._thought(drafted) + self._end_reasoning()
        self._draft.append(self._decoder.feed(token))
        return []

    def _end_reasoning(self) -> list[Piece]:
        self._phase = _Phase.TEXT
        return self._thought(self._decoder.flush(), is_end=True)

    def _write(self, token: int) -> list[Piece]:
        if token == self._markers.call:
            is_first = self._phase is not _Phase.AFTER_CALL
            rest = self._decoder.flush()
            self._phase, self._call = _Phase.CALL, JsonCall()
            return self._text(rest, is_end=True) if is_first else []
        text = self._decoder.feed(token)
        return [] if self._phase is _Phase.AFTER_CALL else self._text(text)

    def _collect(self, token: int) -> list[Piece]:
        if token != self._markers.call_end:
            return self._write_call(self._call.feed(self._decoder.feed(token)))
        self._phase = _Phase.AFTER_CALL
        pieces = self._close_call(self._decoder.flush(), is_whole=True)
        if self._calls and not self._is_parallel:
            self._phase, self._is_ended_early = _Phase.DONE, True
        return pieces

    def _write_call(self, arguments: str) -> list[Piece]:
        """`arguments` are the next part of the open call's."""
        pieces: list[Piece] = []
        index = len(self._calls)
        if self._call.is_begun and not self._call_id:
            self._call_id = self._name_call(index)
            pieces.append(CallStart(index=index, call_id=self._call_id, name=self._call.name))
        if arguments:
            self._arguments.append(arguments)
            pieces.append(CallPiece(index=index, text=arguments))
        return pieces

    def _close_call(self, rest: str, *, is_whole: bool) -> list[Piece]:
        pieces = self._write_call(self._call.feed(rest))
        pieces += self._write_call(self._call.close())
        if not self._call.name:
            end = "</tool_call>" if is_whole else ""
            return self._show("<tool_call>" + "".join(self._call.raw) + end)
        call = Call(call_id=self._call_id, name=self._call.name, arguments="".join(self._arguments))
        pieces.append(CallEnd(index=len(self._calls), call=call))
        self._calls.append(call)
        self._call_id, self._arguments = "", []
        return pieces

    def _drafted_calls(self, rest: str) -> list[Piece]:
        """Reasoning that only a call ended: what followed was the answer after all."""
        pieces: list[Piece] = []
        for block in "".join([*self._draft, rest]).split("<tool_call>"):
            text, end, _ = block.partition("</tool_call>")
            self._call = JsonCall()
            pieces += self._close_call(text, is_whole=bool(end))
            if self._calls and not self._is_parallel:
                break
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
