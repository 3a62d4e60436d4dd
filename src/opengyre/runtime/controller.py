"""The controller's loop: facts in, plan out, written down before anything acts on it.

Consumes: the inbox. Produces: started commands. Waits for: a fact or the scheduler's next timer.
Invariant: every observe and decide is in the journal with its time, in order, and durable before
a command of it starts; so a replay gives the same plans.
"""

import asyncio
from collections.abc import Callable

from opengyre.control.scheduler import Scheduler
from opengyre.runtime.apply import Applier
from opengyre.runtime.inbox import Inbox
from opengyre.store.codec import JournalValue
from opengyre.store.journal import Journal
from opengyre.store.observations import SchedulerCounts

MAX_WAIT_S = 5.0


class Controller:
    """`append(now_s, value)` writes a row of `journal` and returns its number."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        inbox: Inbox,
        journal: Journal,
        append: Callable[[float, JournalValue], int],
        applier: Applier,
        now_s: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._journal = journal
        self._append = append
        self._applier = applier
        self._now_s = now_s
        self._counts: SchedulerCounts | None = None

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Until the scheduler ends the run."""
        while not self._applier.has_ended.is_set():
            now_s = self._now_s()
            for fact in await self._inbox.batch(self._wait_s(now_s)):
                now_s = self._now_s()
                self._append(now_s, fact)
                self._scheduler.observe(fact, now_s)
                self._applier.learn(fact)
            now_s = self._now_s()
            plan = self._scheduler.decide(now_s)
            self._applier.foresee(plan.commands)
            sequence = self._append(now_s, plan)
            self._tell_counts(now_s)
            if plan.commands:
                await self._journal.committed(sequence)
            for command in plan.commands:
                self._applier.start(command, tasks)

    def _tell_counts(self, now_s: float) -> None:
        """The scheduler's own counters, whenever they changed, so that they can be checked."""
        seen = self._scheduler.snapshot()
        counts = SchedulerCounts(
            num_dispatched=seen.dispatched,
            num_launched=seen.launched,
            num_finished=seen.finished,
            capacity_slots=seen.capacity,
        )
        if counts != self._counts:
            self._counts = counts
            self._append(now_s, counts)

    def _wait_s(self, now_s: float) -> float:
        wakeup_s = self._scheduler.next_wakeup_s()
        return MAX_WAIT_S if wakeup_s is None else min(MAX_WAIT_S, max(0.0, wakeup_s - now_s))
