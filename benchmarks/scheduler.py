"""What one event costs the scheduler: observe, decide and the next wake-up, in microseconds.

An event is a close or a verdict of an execution, told to a scheduler whose slots are full; each
table row is the median of its events. Owns nothing but the timing. Run: `make bench`.
"""

import time
from collections import deque
from statistics import median

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.config import EngineSpec, SchedulerConfig
from opengyre.control.ids import ExecutionId, cell_engine_id
from opengyre.control.scheduler import Scheduler

NUM_EVENTS = 1000
LIVE_AND_CELLS = ((1_000, 8), (1_000, 64), (10_000, 64), (100_000, 64), (100_000, 10_000))
FINISHED = (1_000, 10_000, 200_000)


class Shell:
    """The quickest shell there is: every command is applied at once, in time that stands still."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.now_s = 0.0
        self.live: deque[ExecutionId] = deque()
        self.version = 0
        self.num_finished = 0
        for spec in config.engines:
            self.scheduler.observe(
                f.EngineReady(engine=spec.engine, incarnation=1, version=0), self.now_s
            )
        self.settle()

    def settle(self) -> None:
        while plan := self.scheduler.decide(self.now_s).commands:
            for command in plan:
                self._apply(command)

    def _apply(self, command: c.AnyCommand) -> None:
        tell = self.scheduler.observe
        if isinstance(command, c.Launch):
            self.live.append(command.execution)
        elif isinstance(command, c.Offer):
            for group in command.groups:
                tell(f.GroupAssigned(group=group, step=command.step), self.now_s)
        elif isinstance(command, c.Admit):
            tell(f.MemberAdmitted(step=command.step, cell=command.cell), self.now_s)
        tell(f.CommandApplied(command_id=command.command_id), self.now_s)
        if isinstance(command, c.CloseStep):
            self.version += 1
            tell(f.StepCommitted(step=command.step, version=self.version), self.now_s)

    def timed(self, fact: f.Fact) -> float:
        """Microseconds of one event; what it commands is applied outside the timing."""
        self.now_s += 1.0
        begin_s = time.perf_counter()
        self.scheduler.observe(fact, self.now_s)
        plan = self.scheduler.decide(self.now_s)
        self.scheduler.next_wakeup_s()
        spent_s = time.perf_counter() - begin_s
        for command in plan.commands:
            self._apply(command)
        self.settle()
        return spent_s * 1e6

    def finish_one(self) -> tuple[float, float]:
        execution = self.live.popleft()
        self.num_finished += 1
        closed = f.ExecutionClosed(execution=execution, outcome=f.Outcome.COMPLETED)
        verdict = f.VerdictGiven(execution=execution, reward=1.0, reason="", num_trainable_tokens=1)
        return self.timed(closed), self.timed(verdict)


def config_of(num_live: int, num_cells: int) -> SchedulerConfig:
    """Twice the slots that the run-ahead of one step and a burst of two fill."""
    groups_per_step = max(1, num_live // 8 // 3)
    slots = -(-2 * num_live // num_cells)
    engines = tuple(
        EngineSpec(engine=cell_engine_id(cell), slots=slots, cell=cell) for cell in range(num_cells)
    )
    return SchedulerConfig(
        num_cells=num_cells, engines=engines, num_steps=1_000_000, groups_per_step=groups_per_step
    )


def median_us(shell: Shell) -> float:
    return median(cost for _ in range(NUM_EVENTS // 2) for cost in shell.finish_one())


def main() -> None:
    print("live executions, cells: median of an event")
    base_us = None
    for num_live, num_cells in LIVE_AND_CELLS:
        cost_us = median_us(Shell(config_of(num_live, num_cells)))
        base_us = base_us or cost_us
        print(f"{num_live:8,} {num_cells:7,}  {cost_us:6.1f} us  {cost_us / base_us:5.2f}")
    print("finished executions (1,000 live, 8 cells): median of an event")
    shell, base_us = Shell(config_of(1_000, 8)), None
    for num_finished in FINISHED:
        while shell.num_finished < num_finished:
            shell.finish_one()
        cost_us = median_us(shell)
        base_us = base_us or cost_us
        print(f"{num_finished:8,}          {cost_us:6.1f} us  {cost_us / base_us:5.2f}")


if __name__ == "__main__":
    main()
