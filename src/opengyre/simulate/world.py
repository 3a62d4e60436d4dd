"""A simulated run: facts to the scheduler, and its commands answered after what they cost.

Owns: the loop and its end. Must not know: the policy; what a command does.
Invariants: facts reach the scheduler in order at the moment they are true; everything of one
moment is observed before a plan is made; an event costs O(log n), whatever the number of engines.
"""

from collections.abc import Callable

from opengyre.control import facts as f
from opengyre.control.commands import EndRun, Plan
from opengyre.control.errors import InvariantError
from opengyre.control.scheduler import Scheduler
from opengyre.seams.errors import ConfigError
from opengyre.simulate.kernel import Kernel
from opengyre.simulate.result import Result
from opengyre.simulate.scenario import Scenario
from opengyre.simulate.shell import Shell

Sink = Callable[[float, f.Fact | Plan], None]

MAX_ROUNDS_AT_ONCE = 1_000_000


def simulate(scenario: Scenario, seed: int, *, journal: Sink | None = None) -> Result:
    """Run `scenario` to its end. `journal(now_s, value)` sees every fact and plan in order.

    The same scenario and seed give the same Result and the same journal. A run that planned deaths
    leave without anything to happen has failed. Raises ConfigError if the run does not end within
    `scenario.max_s`, InvariantError if a rule of our own is broken.
    """
    return World(scenario, seed, journal).run()


class World:
    """`run` may be called once."""

    def __init__(self, scenario: Scenario, seed: int, journal: Sink | None = None) -> None:
        self._scenario, self._seed, self._journal = scenario, seed, journal
        self.scheduler = Scheduler(scenario.scheduler)
        self._kernel = Kernel()
        self._inbox: list[f.Fact] = []
        self._shell = Shell(scenario, seed, kernel=self._kernel, tell=self._inbox.append)
        self._num_events = 0

    def run(self) -> Result:
        self._shell.start()
        num_rounds, last_s = 0, -1.0
        while (end := self._observe_and_decide()) is None:
            if not self._inbox and not self._advance():
                return self._result(failed=True, reason=self._nothing_left())
            num_rounds = num_rounds + 1 if self._kernel.now_s == last_s else 0
            last_s = self._kernel.now_s
            if num_rounds > MAX_ROUNDS_AT_ONCE:
                raise InvariantError(f"{self._scenario.name}: time stands still at {last_s} s")
        return self._result(failed=end.failed, reason=end.reason)

    def _observe_and_decide(self) -> EndRun | None:
        now_s, facts = self._kernel.now_s, self._inbox[:]
        self._inbox.clear()
        for fact in facts:
            if self._journal is not None:
                self._journal(now_s, fact)
            self.scheduler.observe(fact, now_s)
        plan = self.scheduler.decide(now_s)
        if self._journal is not None:
            self._journal(now_s, plan)
        self._num_events += len(facts) + 1
        for command in plan.commands:
            if isinstance(command, EndRun):
                return command
            self._shell.apply(command)
        return None

    def _advance(self) -> bool:
        """To the next event, or to the scheduler's own timer if that is earlier; False if there is
        neither. Raises ConfigError past `max_s`."""
        kernel = self._kernel
        wakeup_s, next_s = self.scheduler.next_wakeup_s(), kernel.next_s
        if wakeup_s is not None and (next_s is None or wakeup_s < next_s):
            kernel.pass_to(wakeup_s)
        elif next_s is not None:
            kernel.run_next()
            while kernel.next_s == kernel.now_s:
                kernel.run_next()
        else:
            return False
        if kernel.now_s > self._scenario.max_s:
            name, max_s = self._scenario.name, self._scenario.max_s
            raise ConfigError(
                f"{name}: no end after {max_s:g} s of simulated time ({self._waiting()}): expected "
                "durations, costs and steps of a run that ends before that"
            )
        return True

    def _nothing_left(self) -> str:
        """Why nothing can happen any more. Raises InvariantError if nobody planned a death."""
        words = f"nothing can happen any more: {self._waiting()}"
        if not self._scenario.failures:
            raise InvariantError(f"{self._scenario.name}: {words}")
        return words

    def _waiting(self) -> str:
        return "; ".join(self.scheduler.snapshot().waiting_for)

    def _result(self, *, failed: bool, reason: str) -> Result:
        now_s, shell = self._kernel.now_s, self._shell
        books, tally, seen = shell.books, shell.fleet.tally, self.scheduler.snapshot()
        books.close(now_s)
        return Result(
            name=self._scenario.name,
            seed=self._seed,
            num_devices=self._scenario.num_devices,
            wall_s=now_s,
            step_times=shell.steps.times(),
            num_steps=seen.steps_done,
            num_events=self._num_events,
            device_seconds=books.seconds_by_bucket,
            slack=books.slack,
            occupancy=books.occupancy,
            staleness=shell.steps.staleness(),
            num_dispatched=tally.num_dispatched,
            outcomes=tally.num_by_outcome,
            num_moves=tally.num_moves,
            num_replaced=tally.num_replaced,
            num_switches=shell.num_switches,
            num_publications=shell.num_publications,
            stalled_s=tally.stalled_s,
            recomputed_tokens=tally.recomputed_tokens,
            kv_moved_tokens=tally.kv_moved_tokens,
            aborted_s=round(shell.fleet.aborted_s, 3) + 0.0,
            cancelled_s=tally.cancelled_s,
            redone_groups=shell.stream.redone_groups,
            num_short=seen.num_short_steps,
            num_empty=seen.num_empty_steps,
            num_void=seen.num_void,
            num_filtered=seen.num_filtered,
            num_dropped=seen.num_dropped,
            failed=failed,
            reason=reason,
            lanes=tuple(books.lanes),
            num_left_out=books.num_left_out,
        )
