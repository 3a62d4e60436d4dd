"""Brings the sums of a drained step's members together at the core, one try at a time.

Owns: the calls of a try and their deadlines, the form a try takes, names of groups. Must not know:
the stream, or what becomes of a failed try. Invariants: members are asked all at once; who does not
answer in time hangs and is ended; a group that failed is never named again; sums of members are
copied, never changed, so any try can follow any other; the core has all sums or none, so its
answer alone decides.
"""

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isclose
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
CORE = 0

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
        message = m.Settle(step=step)
        return _all(await self._ask(dict.fromkeys(cells, message), self._limits.settle_s))

    async def reduce(self, step: int, epoch: int, settled: Mapping[int, m.Settled]) -> Reduced:
        """One try, with the members that settled. Raises BoundaryError; another try may follow."""
        lives = tuple(f"c{cell}#{self._processes.incarnation(f'c{cell}')}" for cell in settled)
        form = self._form(lives)
        match form:
            case Form.ALONE:
                counts = await self._pull(step, [])
            case Form.GROUP:
                counts = await self._together(step, epoch, settled, lives)
            case Form.STAR:
                counts = await self._star(step, tuple(settled))
        self._num_failed.clear()
        stages = {f"c{cell}": one.stages for cell, one in settled.items()}
        return Reduced(counts=counts, form=form, stages=stages)

    def _form(self, lives: Lives) -> Form:
        if len(lives) == 1:
            return Form.ALONE
        is_hopeless = self._num_failed[lives] >= MAX_GROUP_FAILURES
        has_store = self._may_group and self._processes.store_address(f"c{CORE}") != ""
        return Form.GROUP if has_store and not is_hopeless else Form.STAR

    async def _together(
        self, step: int, epoch: int, settled: Mapping[int, m.Settled], lives: Lives
    ) -> StepCounts:
        """A group of which a member failed is done with, even if the core has all sums."""
        store, name = self._processes.store_address(f"c{CORE}"), self._names.name(lives)
        messages = {
            cell: m.ReduceTogether(
                step=step,
                epoch=epoch,
                rendezvous=Rendezvous(store=store, name=name, rank=rank, size=len(settled)),
                others=[one.counts for other, one in settled.items() if other != cell],
            )
            for rank, cell in enumerate(settled)
        }
        answers = await self._ask(messages, self._limits.answer_s, is_together=True)
        if any(isinstance(one, BoundaryError) for one in answers.values()):
            self._names.forget(lives)
        if isinstance(answers[CORE], BoundaryError):
            self._num_failed[lives] += 1
        return _counts(answers)

    async def _star(self, step: int, cells: tuple[int, ...]) -> StepCounts:
        share = dict.fromkeys(cells[1:], m.ShareGradients(step=step))
        shared = _all(await self._ask(share, self._limits.star_s))
        return await self._pull(step, list(shared.values()))

    async def _pull(self, step: int, members: list[m.Gradients]) -> StepCounts:
        """The core adds what the members share, in the order of cells."""
        message = m.ReduceStep(step=step, members=members)
        return _counts(await self._ask({CORE: message}, self._limits.star_s))

    async def _ask(
        self, messages: Mapping[int, m.Message], within_s: float, *, is_together: bool = False
    ) -> dict[int, Any]:
        """All at once; by cell, in order, the answer or the BoundaryError. `is_together`: who has
        no answer when another failed, or when the others, the core or all but it, are through, is
        not waited for to the end."""
        lives = {cell: self._processes.incarnation(f"c{cell}") for cell in messages}
        async with asyncio.TaskGroup() as group:
            calls = {
                group.create_task(
                    self._answer(cell, message, within_s + self._limits.grace_s)
                ): cell
                for cell, message in messages.items()
            }
            silent = await self._silent(calls, within_s, is_together)
            for call in silent:
                call.cancel()
        for call in silent:
            self._end(f"c{calls[call]}", lives[calls[call]], messages[calls[call]])
        return {cell: _result(call) for call, cell in calls.items()}

    async def _answer(self, cell: int, message: m.Message, timeout_s: float) -> Any:
        try:
            return await self._processes.call(f"c{cell}", message, timeout_s=timeout_s)
        except BoundaryError as error:
            return error

    async def _silent(
        self, calls: Mapping[asyncio.Task[Any], int], within_s: float, is_together: bool
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
            if is_together:
                left_s = min((self._left_s(calls[one], one.result()) for one in done), default=inf)
                if waiting and all(calls[one] == CORE for one in waiting):
                    left_s = min(left_s, self._limits.late_s)
                deadline_s = min(deadline_s, self._now_s() + left_s)
        return waiting

    def _left_s(self, cell: int, answer: Any) -> float:
        """How long the others of a group may still take after this answer."""
        if isinstance(answer, BoundaryError):
            return self._limits.late_s
        return self._limits.grace_s if cell == CORE else inf

    def _end(self, name: str, incarnation: int, message: m.Message) -> None:
        log.warning("%s gives no answer to %s and is ended", name, type(message).__name__)
        self._processes.fence(name, incarnation)


def _result(call: asyncio.Task[Any]) -> Any:
    if call.cancelled():
        return BoundaryError("reduce", "a member hangs", retryable=True)
    return call.result()


def _all(answers: dict[int, Any]) -> dict[int, Any]:
    """Raises the BoundaryError of one that failed."""
    for answer in answers.values():
        if isinstance(answer, BoundaryError):
            raise answer
    return answers


def _counts(answers: Mapping[int, Any]) -> StepCounts:
    """What the core has reduced. Raises its BoundaryError."""
    if isinstance(answers[CORE], BoundaryError):
        raise answers[CORE]
    counts: StepCounts = answers[CORE].counts
    return counts


def check_counts(found: StepCounts, expected: StepCounts, step: int) -> None:
    """The sums hold each micro-step of the step once (P8). Raises InvariantError."""
    are_equal = (
        sorted(found.micro_steps) == sorted(expected.micro_steps)
        and found.num_tokens == expected.num_tokens
        and isclose(found.num_executions, expected.num_executions, rel_tol=1e-9)
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
