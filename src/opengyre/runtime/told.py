"""What children tell the controller, and where each of it goes.

Must not know: what becomes of it. Invariant: every kind of message has exactly one place.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from opengyre.runtime import messages as m
from opengyre.runtime.book import Book, HeldBy
from opengyre.runtime.gateways import Gateways
from opengyre.runtime.steps import Steps
from opengyre.seams.errors import BoundaryError
from opengyre.store.observations import AnyObservation, Continued, Handoff, TurnRecorded
from opengyre.transport.engine_messages import DOOR_IS_CLOSED


class Told:
    """`handle` is the handler of every child's connection."""

    def __init__(
        self,
        *,
        book: Book,
        gateways: Gateways,
        steps: Steps,
        observe: Callable[[AnyObservation], None],
        fence: Callable[[str, int], None],
    ) -> None:
        self._book = book
        self._gateways = gateways
        self._steps = steps
        self._observe = observe
        self._fence = fence
        self.num_sampled_tokens = 0
        self.num_continued = 0

    async def handle(self, name: str, message: Any) -> m.Message | None:
        match message:
            case m.Claim():
                return await self._steps.claim(message)
            case m.Finished():
                self._steps.finished(message)
            case m.TurnTold():
                self._tell_turn(name, message)
            case m.HoldTold():
                one = self._book.executions[message.execution]
                now_s = asyncio.get_running_loop().time()
                one.held.set(HeldBy.REQUEST, message.is_held, now_s)
            case m.LinkLost():
                self._fence(message.engine, message.incarnation)
            case m.ContinuedTold():
                self._tell_continued(message)
            case m.HandoffTold():
                self._observe(Handoff(**msgspec.structs.asdict(message)))
            case _:
                what = f"{name} sent {type(message).__name__}, which nobody takes"
                raise BoundaryError("process", what, retryable=False)
        return None

    def _tell_turn(self, name: str, message: m.TurnTold) -> None:
        self._gateways.heard(name, message.turn)
        if self._book.tell_turn(message.turn):
            self.num_sampled_tokens += message.turn.num_completion_tokens
            self._observe(TurnRecorded(turn=message.turn))

    def _tell_continued(self, message: m.ContinuedTold) -> None:
        self.num_continued += 1
        self._observe(
            Continued(
                execution=message.execution,
                turn=message.turn,
                attempt=message.attempt,
                from_engine=message.from_engine,
                to_engine=message.to_engine,
                reason=_why(message),
                num_tokens_so_far=message.num_tokens_so_far,
            )
        )


def _why(message: m.ContinuedTold) -> str:
    """A request frozen (or come too late) and continued at the same engine met a publication;
    elsewhere, a move."""
    if message.reason not in ("frozen", DOOR_IS_CLOSED):
        return "engine_lost"
    return "publication" if message.from_engine == message.to_engine else "move"
