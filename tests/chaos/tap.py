"""Sees what goes on between the controller of a run and its cells, and tells the moments of it.

Owns: which messages are which moment. Must not know: faults. Invariant: what is seen is passed on
unchanged, but for the pace of checkpoints.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opengyre.control.cells import CellRole
from opengyre.runtime import messages as m
from opengyre.runtime.run import Run
from tests.chaos.faults import Moment

PAUSE_S = 0.1
LOOK_S = 0.01
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A moment of `cell` begins now and lasts while `is_on()`; cell None: of all of them."""

    moment: Moment
    cell: int | None
    is_on: Callable[[], bool]

    def of(self, moment: Moment, cell: int) -> bool:
        return self.moment is moment and self.cell in (None, cell)


class Tap:
    """`on` is called in the loop at each moment. A checkpoint is held until `may_save()`.
    `num_dropped`: how often a cell was told to forget a step. `before` is called with each message
    that is about to be sent, and to whom."""

    def __init__(
        self, run: Run, on: Callable[[Seen], None], *, may_save: Callable[[], bool]
    ) -> None:
        self._run = run
        self._on = on
        self._may_save = may_save
        self.before: Callable[[str, m.Message], None] = lambda name, message: None
        self._in_hand: Counter[int] = Counter()
        self.num_dropped: Counter[int] = Counter()
        self._call = run.processes.call
        self._claim = run.steps.claim
        self._finished = run.steps.finished
        run.processes.call = self.call  # type: ignore[method-assign]
        run.steps.claim = self.claim  # type: ignore[method-assign]
        run.steps.finished = self.finished  # type: ignore[method-assign]

    async def call(self, name: str, message: m.Message, **more: Any) -> Any:
        if isinstance(message, m.SaveState):
            await until(self._may_save)
        if isinstance(message, m.DropStep):
            self.num_dropped[int(name[1:])] += 1
        self.before(name, message)
        answer = asyncio.ensure_future(self._call(name, message, **more))
        try:
            await asyncio.sleep(0)
            for moment, cell in self._moments(name, message):
                self._on(Seen(moment=moment, cell=cell, is_on=lambda: not answer.done()))
            return await answer
        finally:
            answer.cancel()

    def _moments(self, name: str, message: m.Message) -> list[tuple[Moment, int | None]]:
        cell = int(name[1:]) if name.startswith("c") else None
        match message:
            case m.LoadVersion() if self._run.steps.last_published is not None:
                return [(Moment.PUBLISH, None)]
            case m.SaveState():
                return [(Moment.CHECKPOINT, None)]
            case m.UpdateStep():
                return [(Moment.UPDATE, None)]
            case m.JoinStep():
                return [(Moment.JOIN, cell)]
            case m.Settle():
                return [(Moment.SETTLE, cell)]
            case m.ReduceTogether() | m.ShareGradients():
                return [(Moment.REDUCE, cell)]
            case m.ReduceStep() if message.members:
                return [(Moment.REDUCE, cell)]
            case m.FreezeAll() | m.BeTrainer() if cell is not None and self._leaves(cell):
                return [(Moment.LEAVE, cell)]
            case m.BeEngine():
                return [(Moment.RETURN, cell)]
            case _:
                return []

    def _leaves(self, cell: int) -> bool:
        return self._run.scheduler.snapshot().role_by_cell[cell] is CellRole.LEAVING

    async def claim(self, asked: m.Claim) -> m.Claimed:
        answer = asyncio.ensure_future(self._claim(asked))
        cell = asked.cell
        try:
            await asyncio.wait([answer], timeout=PAUSE_S)
            if not answer.done() and not self._in_hand[cell]:
                on = Seen(moment=Moment.PAUSE, cell=cell, is_on=lambda: not answer.done())
                self._on(on)
            claimed = await answer
        finally:
            answer.cancel()
        if claimed.micro_step is not None:
            self._in_hand[cell] += 1
            asyncio.get_running_loop().call_soon(
                self._on,
                Seen(moment=Moment.WORK, cell=cell, is_on=lambda: bool(self._in_hand[cell])),
            )
        if claimed.is_closed:
            self._in_hand[cell] = 0
        return claimed

    def finished(self, told: m.Finished) -> None:
        self._in_hand[told.cell] = max(0, self._in_hand[told.cell] - 1)
        self._finished(told)


async def until(is_so: Callable[[], bool]) -> None:
    """Look again and again, for as long as a start on a busy machine may take."""
    for _ in range(int(PATIENCE_S / LOOK_S)):
        if is_so():
            return
        await asyncio.sleep(LOOK_S)
    raise TimeoutError
