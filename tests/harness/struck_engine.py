"""A scripted engine that stops at a chosen point of its answer and lets something happen there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from opengyre.engines.scripted import Respond, ScriptedConfig, ScriptedEngine
from opengyre.seams.engine import Chunk, Finish, GenerateRequest

Decode = Callable[[list[int]], str]


class Point(StrEnum):
    """Where in an answer that thinks, speaks and calls a tool."""

    BEFORE_FIRST = "before the first token"
    THINKING = "in thinking"
    TEXT = "in text"
    ARGUMENTS = "inside tool arguments"
    BEFORE_END = "right before the end"


@dataclass(slots=True)
class Served:
    """What an engine was asked and what it gave."""

    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def turn(self) -> str:
        return self.request.request_id.split(".a")[0]


Strike = Callable[["StruckEngine"], Finish | None]
"""Called at the point; the answer's part ends with the finish it returns, or never."""


@dataclass(slots=True)
class Log:
    """Shared by the engines of a run: points still to come, points that came, requests served."""

    points: list[Point] = field(default_factory=list)
    struck: list[Point] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)


class StruckEngine(ScriptedEngine):
    """The log's points are used up in order, one in each turn that thinks, speaks and calls."""

    def __init__(
        self, name: str, respond: Respond, config: ScriptedConfig, *, decode: Decode, log: Log
    ) -> None:
        super().__init__(respond, config)
        self.name = name
        self.strike: Strike | None = None
        self._answer = respond
        self._decode = decode
        self._log = log

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        served = Served(request)
        is_first = all(one.turn != served.turn for one in self._log.served)
        self._log.served.append(served)
        num = self._num_until_point(request) if is_first else None
        part = request if num is None else msgspec.structs.replace(request, max_new_tokens=num or 1)
        if num != 0:
            async for chunk in super().submit(part):
                served.ids += chunk.ids
                served.logprobs += chunk.logprobs
                if num is None or chunk.finish is None:
                    yield chunk
        if num is None:
            return
        self._log.struck.append(self._log.points.pop(0))
        assert self.strike is not None
        finish = self.strike(self)
        if finish is None:
            await asyncio.Event().wait()
        yield Chunk(finish=finish, reason="struck")

    def _num_until_point(self, request: GenerateRequest) -> int | None:
        """How many tokens come before the next point; None if this answer does not have it."""
        if not self._log.points:
            return None
        try:
            answer = self._answer(list(request.prompt_ids), request.seed)
        except ValueError:
            return None
        text = self._decode(answer)
        if "<think>" not in text or "<tool_call>" not in text:
            return None
        end = text.rindex("<|im_end|>")
        chars = {
            Point.BEFORE_FIRST: 0,
            Point.THINKING: text.index("<think>") + len("<think>") + 5,
            Point.TEXT: text.index("</think>") + len("</think>\n\n") + 4,
            Point.ARGUMENTS: text.index('"arguments"') + len('"arguments": {"') + 3,
            Point.BEFORE_END: end,
        }[self._log.points[0]]
        return _num_tokens(self._decode, answer, chars)


def _num_tokens(decode: Decode, ids: list[int], num_chars: int) -> int:
    num = 0
    while len(decode(ids[:num])) < num_chars:
        num += 1
    return num
