"""What a cell's process has claimed of one step: the request that is open and the work in hand.

Must not know: what a micro-step is for, roles. Invariants: at most one request is open; what ends
was started, once.
"""

import asyncio
from collections.abc import Callable, Sequence

from opengyre.runtime import messages as m
from opengyre.seams.cells import MicroStep
from opengyre.transport.framed import Peer

CLAIM_TIMEOUT_S = 30.0


class Claims:
    """Requests `claim` from the controller, again and again."""

    def __init__(self, peer: Peer, claim: m.Claim, tasks: asyncio.TaskGroup) -> None:
        self._peer = peer
        self._claim = claim
        self._tasks = tasks
        self._asked: asyncio.Task[m.Claimed] | None = None

    def ask(self) -> "asyncio.Task[m.Claimed]":
        """The open request; a new one if there is none."""
        if self._asked is None:
            call = self._peer.call(self._claim, timeout_s=CLAIM_TIMEOUT_S)
            self._asked = self._tasks.create_task(call)
        return self._asked

    async def take(self) -> m.Claimed:
        """Await the open request."""
        claimed = await self.ask()
        self._asked = None
        return claimed

    def close(self) -> None:
        if self._asked is not None:
            self._asked.cancel()


class WorkInHand:
    """Micro-steps that were started and did not end yet. False when there is none."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._started: dict[int, tuple[MicroStep, float]] = {}
        self._last_ended_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._started)

    def start(self, micro_step: MicroStep) -> None:
        self._started[micro_step.number] = (micro_step, self._now_s())

    def end(self, numbers: Sequence[int]) -> list[tuple[MicroStep, float]]:
        """Those that ended, each with the seconds since it was started or the one before it ended,
        whichever is later: they add up to the time in which there was work. One without tokens
        overtakes those in the pipeline."""
        ended = []
        for number in numbers:
            micro_step, started_s = self._started.pop(number)
            now_s = self._now_s()
            ended.append((micro_step, now_s - max(started_s, self._last_ended_s)))
            self._last_ended_s = now_s
        return ended
