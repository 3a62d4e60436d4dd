"""Sampled ids to answer pieces as they come, for every family of the table.

Owns: the phases of an answer. Must not know: engines, dialects, how a block's text is read.
Invariants: the pieces do not depend on how the ids were split; joined they are `message()`; a
call's arguments come as they are sampled (or as the family's own reader reads them) and are never
repaired; a block without a name is text; other text after the first call is shown only for
families that write it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from opengyre.gateway.call_counts import BegunCall
from opengyre.gateway.rendering.detokenize import TextDecoder
from opengyre.gateway.rendering.families import InReasoning, Stream
from opengyre.gateway.rendering.markers import Markers
from opengyre.gateway.rendering.visible import VisibleText
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


class CallReader(Protocol):
    """Feeds on the text of a block and gives its arguments; `name` is "" until it is known."""

    name: str

    @property
    def is_begun(self) -> bool: ...

    def feed(self, text: str) -> str: ...

    def close(self, *, is_whole: bool) -> str: ...


ReadCall = tuple[str, str]
"""Name and arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What one answer's client asked for.

    `call_id(index)` names the calls. `open_call` reads one as it comes (Stream.ARGUMENTS),
    `read_calls` the ids of a block (the whole answer's with Stream.TAIL), [] where there is none.
    Unless `is_parallel` the answer ends after its first call. `forced` are ids at the prompt's end
    that already belong to the answer.
    """

    stops: tuple[str, ...]
    call_id: Callable[[int], str]
    open_call: Callable[[], CallReader]
    read_calls: Callable[[Sequence[int]], list[ReadCall]]
    is_parallel: bool = True
    forced: Sequence[int] = ()


class _Phase(Enum):
    START = auto()
    HEADER = auto()  # of a part whose kind the next marker tells
    REASONING = auto()
    MAYBE_CALL = auto()  # a call's marker inside reasoning: a draft if it is closed later
    TEXT = auto()
    CALL = auto()
    TAIL = auto()  # what may be calls, read at the end
    DONE = auto()


_PLAIN = (_Phase.TEXT, _Phase.REASONING)


class AnswerParser:
    """One answer. `feed` gives pieces one id at a time, `feed_all` fewer and longer ones of many;
    `finish` gives the rest.

    After `is_stopped` no more ids are wanted; `is_ended_early` if the engine cannot know that and
    must be stopped.
    """

    def __init__(self, markers: Markers, plan: AnswerPlan) -> None:
        self._markers = markers
        self._plan = plan
        self._decoder = TextDecoder(markers.table)
        self._phase = _Phase.REASONING if markers.starts_in_reasoning else _Phase.START
        if markers.header >= 0:
            self._phase = _Phase.HEADER
        opener = () if markers.is_opener_first or not markers.opener else (markers.opener,)
        self._visible = VisibleText(plan.stops + opener)
        self._thoughts = VisibleText(label=markers.label)
        self._is_past_text = False
        self._ids: list[int] = []
        self._block: list[int] = []
        self._tail: list[str] = []
        self._open = plan.open_call()
        self._name = ""
        self._call_id = ""
        self._arguments: list[str] = []
        self._shown: list[str] = []
        self._reasoned: list[str] = []
        self._calls: list[Call] = []
        self._begun: list[BegunCall] = []
        self._is_closed = False  # the block being read
        self._is_single_done = False
        self._forced = [piece for token in plan.forced for piece in self._take(token)]

    @property
    def is_stopped(self) -> bool:
        """A stop id, a stop string or the only call that was wanted."""
        return self._phase is _Phase.DONE or self.is_ended_early

    @property
    def is_between_parts(self) -> bool:
        """Neither inside reasoning nor inside a call."""
        return self._phase in (_Phase.START, _Phase.TEXT)

    @property
    def is_ended_early(self) -> bool:
        return self._is_single_done or bool(self.stop_string)

    @property
    def stop_string(self) -> str:
        """The stop string that its text came to, or ""."""
        stop = self._visible.stop
        return stop if stop and stop in self._plan.stops else ""

    @property
    def begun(self) -> tuple[BegunCall, ...]:
        """Each block that was to be a call and is over."""
        return tuple(self._begun)

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
        forced, self._forced = self._forced, []
        if self.is_stopped:
            return forced
        if token in self._markers.stops:
            return forced + self._end()
        return forced + self._take(token)

    def feed_all(self, ids: Sequence[int]) -> tuple[list[Piece], int]:
        """The pieces of `ids` up to where the answer stops, and how many it took."""
        pieces: list[Piece] = []
        at = 0
        while at < len(ids) and not self.is_stopped:
            end = self._end_of_plain(ids, at)
            if end > at:
                pieces += self._write_plain(ids[at:end])
            else:
                pieces += self.feed(ids[at])
                end += 1
            at = end
        return pieces, at

    def finish(self) -> list[Piece]:
        """No more ids: everything held back comes out."""
        forced, self._forced = self._forced, []
        return forced + self._end()

    def _end_of_plain(self, ids: Sequence[int], at: int) -> int:
        """Where the run ends that can be read as one: no markers, and no stop string to find."""
        if len(ids) - at < 2 or self._forced or self._plan.stops or self._markers.opener:
            return at
        is_parts = self._markers.stream is Stream.ARGUMENTS
        if self._phase not in _PLAIN and not (self._phase is _Phase.CALL and is_parts):
            return at
        special = self._markers.special
        return next((k for k in range(at, len(ids)) if ids[k] in special), len(ids))

    def _write_plain(self, ids: Sequence[int]) -> list[Piece]:
        self._ids += ids
        text = self._decoder.feed_all(ids)
        if self._phase is _Phase.TEXT:
            return self._text(text)
        if self._phase is _Phase.REASONING:
            return self._thought(text)
        self._block += ids
        return self._write_call(self._open.feed(text))

    def _take(self, token: int) -> list[Piece]:
        self._ids.append(token)
        return self._read(token)

    def _read(self, token: int) -> list[Piece]:
        match self._phase:
            case _Phase.START:
                return self._start(token)
            case _Phase.HEADER:
                return self._head(token)
            case _Phase.REASONING:
                return self._reason(token)
            case _Phase.MAYBE_CALL:
                return self._draft(token)
            case _Phase.TEXT:
                return self._write(token)
            case _Phase.CALL:
                return self._collect(token)
            case _Phase.TAIL:
                self._tail.append(self._decoder.feed(token))
        return []

    def _end(self) -> list[Piece]:
        if self._phase is _Phase.MAYBE_CALL:
            return self._end_reasoning() + self._replay() + self._end()
        phase, self._phase = self._phase, _Phase.DONE
        match phase:
            case _Phase.REASONING:
                return self._thought(self._decoder.flush(), is_end=True)
            case _Phase.CALL:
                return self._close_call(is_whole=False) + self._text("", is_end=True)
            case _Phase.TAIL:
                return self._close_tail()
            case _Phase.HEADER:
                return self._text(self._text_of(self._block), is_end=True)
            case _Phase.START | _Phase.TEXT:
                return self._text(self._decoder.flush(), is_end=True)
        return []

    def _start(self, token: int) -> list[Piece]:
        if token == self._markers.think:
            self._decoder.flush()
            self._phase = _Phase.REASONING
            return []
        if token in (self._markers.call, self._markers.section):
            return self._write(token)
        text = self._decoder.feed(token)
        if not text.strip():
            return self._text(text)
        self._phase = _Phase.TEXT
        if self._markers.is_opener_first and text.lstrip().startswith(self._markers.opener):
            self._phase, self._tail = _Phase.TAIL, [text]
            return []
        return self._text(text)

    def _head(self, token: int) -> list[Piece]:
        if token == self._markers.call:
            return self._open_call(token)
        if token not in self._markers.silent and token != self._markers.think:
            self._block.append(token)
            return []
        block, self._block = self._block, []
        is_reasoning = token == self._markers.think
        self._phase = _Phase.REASONING if is_reasoning else _Phase.TEXT
        return self._text(self._text_of(block))

    def _reason(self, token: int) -> list[Piece]:
        if token == self._markers.think_end:
            return self._end_reasoning()
        if token == self._markers.think:
            return []
        if token not in (self._markers.call, self._markers.section):
            return self._thought(self._decoder.feed(token))
        match self._markers.in_reasoning:
            case InReasoning.CALL:
                return self._end_reasoning() + self._write(token)
            case InReasoning.PART:
                return self._thought(self._decoder.feed(token))
            case InReasoning.DRAFT:
                self._phase, self._block = _Phase.MAYBE_CALL, [token]
                return self._thought(self._decoder.flush())

    def _draft(self, token: int) -> list[Piece]:
        if token != self._markers.think_end:
            self._block.append(token)
            return []
        drafted, self._block = self._text_of(self._block), []
        return self._thought(drafted) + self._end_reasoning()

    def _replay(self) -> list[Piece]:
        """Reasoning that only a call ended: what followed was the answer after all."""
        block, self._block = self._block, []
        return [p for token in block if not self.is_stopped for p in self._read(token)]

    def _end_reasoning(self) -> list[Piece]:
        self._phase = _Phase.TEXT
        return self._thought(self._decoder.flush(), is_end=True)

    def _write(self, token: int) -> list[Piece]:
        if token == self._markers.call:
            return self._open_call(token)
        if token == self._markers.section:
            return self._end_text()
        if token == self._markers.header:
            self._phase = _Phase.HEADER
            return self._text(self._decoder.flush())
        return [] if token in self._markers.silent else self._text(self._decoder.feed(token))

    def _open_call(self, token: int) -> list[Piece]:
        self._phase, self._open = _Phase.CALL, self._plan.open_call()
        self._block.append(token)
        return self._end_text()

    def _end_text(self) -> list[Piece]:
        has_more = self._markers.has_text_after_calls
        pieces = self._text(self._decoder.flush(), is_end=not has_more)
        self._is_past_text = not has_more
        return pieces

    def _collect(self, token: int) -> list[Piece]:
        self._block.append(token)
        if token == self._markers.call_end:
            self._phase = _Phase.TEXT
            return self._close_call(is_whole=True)
        if self._markers.stream is Stream.ARGUMENTS:
            return self._write_call(self._open.feed(self._decoder.feed(token)))
        return []

    def _close_call(self, *, is_whole: bool) -> list[Piece]:
        block, self._block = self._block, []
        self._is_closed = is_whole
        if self._markers.stream is not Stream.ARGUMENTS:
            return self._whole_calls(block) or self._no_call(self._text_of(block))
        pieces = self._write_call(self._open.feed(self._decoder.flush()))
        pieces += self._write_call(self._open.close(is_whole=is_whole))
        if self._name:
            return pieces + self._end_call()
        return self._whole_calls(block) or self._no_call(self._text_of(block))

    def _write_call(self, arguments: str) -> list[Piece]:
        """`arguments` are the next part of the open call's."""
        starts = self._open.is_begun and not self._name
        pieces = self._start_call(self._open.name) if starts else []
        return pieces + self._add_arguments(arguments)

    def _whole_calls(self, ids: list[int]) -> list[Piece]:
        found = self._plan.read_calls(ids)
        pieces: list[Piece] = []
        for name, arguments in found if self._plan.is_parallel else found[:1]:
            pieces += self._start_call(name) + self._add_arguments(arguments) + self._end_call()
        return pieces

    def _no_call(self, text: str) -> list[Piece]:
        self._begun.append(BegunCall(call=None, is_closed=self._is_closed))
        return self._show(text)

    def _start_call(self, name: str) -> list[Piece]:
        index = len(self._calls)
        self._name, self._call_id, self._arguments = name, self._plan.call_id(index), []
        return [CallStart(index=index, call_id=self._call_id, name=name)]

    def _add_arguments(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._arguments.append(text)
        return [CallPiece(index=len(self._calls), text=text)]

    def _end_call(self) -> list[Piece]:
        arguments = "".join(self._arguments)
        call = Call(call_id=self._call_id, name=self._name, arguments=arguments)
        self._calls.append(call)
        self._begun.append(BegunCall(call=call, is_closed=self._is_closed))
        self._name = ""
        self._is_single_done = not self._plan.is_parallel
        return [CallEnd(index=len(self._calls) - 1, call=call)]

    def _close_tail(self) -> list[Piece]:
        """The answer's end of a family whose calls nothing closes: calls, or text after all."""
        pieces = self._whole_calls(self._ids)
        if pieces:
            return pieces
        if self._is_call_begun():
            self._begun.append(BegunCall(call=None, is_closed=False))
        self._visible = VisibleText(self._plan.stops, has_begun=bool(self._shown))
        return self._text("".join([*self._tail, self._decoder.flush()]), is_end=True)

    def _is_call_begun(self) -> bool:
        """In the tail. A brace begins any JSON, a call only with a name."""
        if self._markers.is_opener_first:
            return '"name"' in "".join(self._tail)
        return bool(self._markers.opener) and self._visible.stop == self._markers.opener

    def _text_of(self, ids: list[int]) -> str:
        decoder = TextDecoder(self._markers.table)
        return "".join([*map(decoder.feed, ids), decoder.flush()])

    def _text(self, text: str, *, is_end: bool = False) -> list[Piece]:
        if self._is_past_text:
            return []
        shown = self._visible.feed(text)
        if self._visible.stop and not self.stop_string:
            self._phase, self._tail = _Phase.TAIL, [self._visible.rest]
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
