"""The control plane: facts in, plan out.

Owns: the order in which rules look at the state. Must not know: clocks, processes, files; time
is an argument. Invariants: the same facts at the same times give the same plans; `observe`
changes state and gives no command; `decide` leaves nothing undone that needs no new fact.
"""

from opengyre.control import (
    boundary,
    ending,
    intake,
    members,
    moves,
    publication,
    recovery,
    slots,
    steps,
    waiting,
)
from opengyre.control.commands import Plan
from opengyre.control.config import SchedulerConfig
from opengyre.control.errors import InvariantError
from opengyre.control.facts import Fact
from opengyre.control.ids import GroupId
from opengyre.control.run_state import RunState, new_run_state
from opengyre.control.view import SchedulerView, take_view

MAX_ROUNDS = 16


class Scheduler:
    """`observe` every fact in order, then `decide`; again at `next_wakeup_s` if nothing came.

    Times never go back. Errors: InvariantError when a rule of our own is broken.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._run = new_run_state(config)
        self._now_s = 0.0

    def observe(self, fact: Fact, now_s: float) -> None:
        self._now_s = now_s
        intake.take(self._run, fact, now_s)
        moves.update_supply(self._run, now_s)

    def decide(self, now_s: float) -> Plan:
        run, self._now_s = self._run, now_s
        for _ in range(MAX_ROUNDS):
            run.is_dirty = False
            _look(run, now_s)
            if not run.is_dirty:
                break
        else:
            raise InvariantError(f"the plan did not settle in {MAX_ROUNDS} rounds")
        return Plan(commands=run.outbox.take_plan(), waiting_for=waiting.words(run))

    def next_wakeup_s(self) -> float | None:
        return waiting.next_wakeup_s(self._run, self._now_s)

    def is_over(self, group: GroupId) -> bool:
        """No step will ask for it: consumed for good, void, filtered or dropped."""
        return group not in self._run.groups.by_id

    def snapshot(self) -> SchedulerView:
        return take_view(self._run)


def _look(run: RunState, now_s: float) -> None:
    if run.burst.phase not in ending.OVER:
        _clocks(run, now_s)
        moves.advance(run, now_s)
        boundary.advance(run, now_s)
        moves.enter_bound(run)
        steps.advance(run, now_s)
        moves.update_supply(run, now_s)
        recovery.recall(run, now_s)
        moves.start_next(run, now_s)
        moves.return_cells(run)
        publication.reconcile(run, now_s)
        if run.failure is None and run.stop_reason is None:
            slots.fill(run, now_s)
    ending.advance(run, now_s)


def _clocks(run: RunState, now_s: float) -> None:
    publication.check_timeouts(run, now_s)
    recovery.fence_suspects(run)
    recovery.watch_capacity(run, now_s)
    steps.check_join_deadlines(run, now_s)
    members.check_eval_deadlines(run, now_s)
    recovery.tell_losses(run)
