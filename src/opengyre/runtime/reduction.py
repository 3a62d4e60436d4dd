"""Brings the sums of a drained step's members together at the core, one try at a time.

Owns: the calls of a try and their deadlines, the form a try takes, names of groups. Must not know:
the stream, or what becomes of a failed try. Invariants: members are asked all at once; who does not
answer in time hangs and is ended; a group that failed is never named again; sums of members are
copied, never changed, so any try can follow any other; a membership whose group failed twice uses
the star from then on.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from opengyre.control.errors import InvariantError
from opengyre.runtime import messages as m
from opengyre.runtime.processes import Processes
from opengyre.seams.cells import Rendezvous, StageTimes, StepCounts
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.group_limits import NUM_KEPT, GroupLimits
from opengyre.trainer.wire import add_counts

SHOWN_AFTER_S = 10.0
MAX_GROUP_FAILURES = 2

Lives = tuple[str, ...]

log = logging.getLogger(__name__)


class Form(StrEnum):
    """How the sums come to the core: it is alone, all reduce together, or it pulls them."""

    ALONE = "alone"
    GROUP = "group"
    STAR = "star"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What came together, and how: `seconds` since the stream ended, over all tries. `stages`: by
    member, the times of its pipeline stages."""

    counts: StepCounts
    form: Form
    stages: dict[str, list[StageTimes]]
    num_tries: int = 1
    seconds: float = 0.0


class GroupNames:
    """Names of groups that are made, by the lives of their members; the latest `NUM_KEPT`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._made: OrderedDict[Lives, str] = OrderedDict()

    def name(self, lives: Lives) -> str:
        if lives not in self._made:
            self._made[lives] = f"{'+'.join(lives)}/{next(self._numbers)}"
        self._made.move_to_end(lives)
        while len(self._made) > NUM_KEPT:
            self._made.popitem(last=False)
        return self._made[lives]

    def forget(self, lives: Lives) -> None:
        self._made.pop(lives, None)


class Reducer:
    """`may_group`: members of this run may meet in groups, if the core hosts a store for them."""

    def __init__(
        self,
        processes: Processes,
        *,
        may_group: bool,
        now_s: Callable[[], float],
        limits: GroupLimits,
    ) -> None:
        self._limits = limits
        self._processes = processes
        self._may_group = may_group
        self._now_s = now_s
        self._names = GroupNames()
        self._num_failed: Counter[Lives] = Counter()

    async def settle(self, step: int, cells: tuple[int, ...]) -> dict[int, m.Settled]:
        """Each of `cells` stands still and says what its sums hold. Raises BoundaryError."""
        return await self._ask(
            dict.fromkeys(cells, m.Settle(step=step)), within_s=self._limits.settle_s
        )

    async def reduce(self, step: int, epoch: int, settled: Mapping[int, m.Settled]) -> Reduced:
        """One try, with the members that settled. Raises BoundaryError; another try may follow."""
        form, counts = await self._together(step, epoch, settled)
        stages = {f"c{cell}": one.stages for cell, one in settled.items()}
        return Reduced(counts=counts, form=form, stages=stages)

    async def _together(
        self, step: int, epoch: int, settled: Mapping[int, m.Settled]
    ) -> tuple[Form, StepCounts]:
        if len(settled) == 1:
            return Form.ALONE, await self._pull(step, {})
        lives = tuple(f"c{cell}#{self._processes.incarnation(f'c{cell}')}" for cell in settled)
        store = self._processes.store_address("c0")
        if not self._may_group or not store or self._num_failed[lives] >= MAX_GROUP_FAILURES:
            return Form.STAR, await self._star(step, tuple(settled))
        name = self._names.name(lives)
        messages = {
            cell: m.ReduceTogether(
                step=step,
                epoch=epoch,
                rendezvous=Rendezvous(store=store, name=name, rank=rank, size=len(settled)),
                others=[one.counts for other, one in settled.items() if other != cell],
            )
            for rank, cell in enumerate(settled)
        }
        try:
            reduced = await self._ask(
                messages, within_s=self._limits.answer_s, grace_s=self._limits.grace_s
            )
        except BoundaryError:
            self._names.forget(lives)
            self._num_failed[lives] += 1
            raise
        self._num_failed.pop(lives, None)
        counts: StepCounts = reduced[0].counts
        return Form.GROUP, counts

    async def _star(self, step: int, cells: tuple[int, ...]) -> StepCounts:
        share = m.ShareGradients(step=step)
        return await self._pull(
            step, await self._ask(dict.fromkeys(cells[1:], share), within_s=self._limits.star_s)
        )

    async def _pull(self, step: int, members: Mapping[int, m.Gradients]) -> StepCounts:
        """The core adds what the members share, in the order of cells."""
        message = m.ReduceStep(step=step, members=list(members.values()))
        counts: StepCounts = (await self._ask({0: message}, within_s=self._limits.star_s))[0].counts
        return counts

    async def _ask(
        self,
        messages: Mapping[int, m.Message],
        *,
        within_s: float,
        grace_s: float | None = None,
    ) -> dict[int, Any]:
        """All at once; answers by cell, in order. Raises the BoundaryError of one that failed.

        Once one has failed the others have `grace_s` more (None: all of `within_s`).
        """
        lives = {cell: self._processes.incarnation(f"c{cell}") for cell in messages}
        async with asyncio.TaskGroup() as group:
            calls = {
                group.create_task(
                    self._answer(cell, message, within_s + self._limits.grace_s)
                ): cell
                for cell, message in messages.items()
            }
            silent = await self._silent(calls, within_s, grace_s)
            for call in silent:
                self._end(f"c{calls[call]}", lives[calls[call]], messages[calls[call]])
                call.cancel()
        answers = {calls[call]: call.result() for call in calls if call not in silent}
        failed = [one for one in answers.values() if isinstance(one, BoundaryError)]
        if failed or silent:
            raise (*failed, BoundaryError("reduce", "a member hangs", retryable=True))[0]
        return answers

    async def _answer(self, cell: int, message: m.Message, timeout_s: float) -> Any:
        try:
            return await self._processes.call(f"c{cell}", message, timeout_s=timeout_s)
        except BoundaryError as error:
            return error

    async def _silent(
        self, calls: Mapping[asyncio.Task[Any], int], within_s: float, grace_s: float | None
    ) -> set[asyncio.Task[Any]]:
        """Those that have no answer when the time is over."""
        waiting, started_s = set(calls), self._now_s()
        deadline_s, show_s = started_s + within_s, started_s + SHOWN_AFTER_S
        while waiting and (now_s := self._now_s()) < deadline_s:
            if now_s >= show_s:
                names = ", ".join(sorted(f"c{calls[call]}" for call in waiting))
                log.warning("waiting for %s to answer, %.0f s so far", names, now_s - started_s)
                show_s += SHOWN_AFTER_S
            timeout_s = min(deadline_s, show_s) - now_s
            done, waiting = await asyncio.wait(
                waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if grace_s is not None and any(isinstance(one.result(), BoundaryError) for one in done):
                deadline_s = min(deadline_s, self._now_s() + grace_s)
        return waiting

    def _end(self, name: str, incarnation: int, message: m.Message) -> None:
        log.warning("%s gives no answer to %s and is ended", name, type(message).__name__)
        self._processes.fence(name, incarnation)


def check_counts(found: StepCounts, expected: StepCounts, step: int) -> None:
    """The sums hold each micro-step of the step once (P8). Raises InvariantError."""
    are_equal = (
        sorted(found.micro_steps) == sorted(expected.micro_steps)
        and found.num_tokens == expected.num_tokens
        and math.isclose(found.num_executions, expected.num_executions, rel_tol=1e-9)
    )
    if not are_equal:
        raise InvariantError(
            f"the sums of step {step} hold micro-steps {sorted(found.micro_steps)} with "
            f"{found.num_tokens} tokens, done are {sorted(expected.micro_steps)} with "
            f"{expected.num_tokens}"
        )


def total_of(settled: Iterable[m.Settled]) -> StepCounts:
    total = StepCounts()
    for one in settled:
        total = add_counts(total, one.counts)
    return total
