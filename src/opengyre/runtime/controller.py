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
from opengyre.store.journal import Journal

MAX_WAIT_S = 5.0


class Controller:
    def __init__(
        self,
        scheduler: Scheduler,
        *,
        inbox: Inbox,
        journal: Journal,
        applier: Applier,
        now_s: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._journal = journal
        self._applier = applier
        self._now_s = now_s

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Until the scheduler ends the run."""
        while not self._applier.has_ended.is_set():
            now_s = self._now_s()
            for fact in await self._inbox.batch(self._wait_s(now_s)):
                now_s = self._now_s()
                self._journal.append(now_s, fact)
                self._scheduler.observe(fact, now_s)
            now_s = self._now_s()
            plan = self._scheduler.decide(now_s)
            sequence = self._journal.append(now_s, plan)
            if plan.commands:
                await self._journal.committed(sequence)
            for command in plan.commands:
                self._applier.start(command, tasks)

    def _wait_s(self, now_s: float) -> float:
        wakeup_s = self._scheduler.next_wakeup_s()
        return MAX_WAIT_S if wakeup_s is None else min(MAX_WAIT_S, max(0.0, wakeup_s - now_s))
