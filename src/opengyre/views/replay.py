"""`gyre run replay`: the journal's facts, fed to a fresh scheduler, must give the same plans.

Owns: the comparison. Must not know: how a plan is made. Invariant: the scheduler sees the same
calls at the same times, in the same order, as in the run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from opengyre.control.commands import Plan
from opengyre.control.facts import Fact
from opengyre.store.journal import Row
from opengyre.store.observations import RunStarted


class Decider(Protocol):
    """What replay needs of a scheduler."""

    def observe(self, fact: Fact, now_s: float) -> None: ...

    def decide(self, now_s: float) -> Plan: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """`difference` is empty when all plans were the same, else words for the first one."""

    num_facts: int
    num_plans: int
    num_commands: int
    difference: str

    @property
    def is_same(self) -> bool:
        return not self.difference


def replay(rows: Iterable[Row], make: Callable[[dict[str, Any]], Decider]) -> ReplayResult:
    """`make` builds the scheduler from RunStarted.scheduler. Stops at the first difference."""
    scheduler: Decider | None = None
    num_facts = num_plans = num_commands = 0
    difference = ""
    for row in rows:
        if isinstance(row.value, RunStarted):
            scheduler = make(row.value.scheduler)
        elif scheduler is None:
            difference = f"row {row.seq} comes before the run's first row"
        elif isinstance(row.value, Plan):
            num_plans += 1
            num_commands += len(row.value.commands)
            difference = _difference(row, row.value, scheduler.decide(row.now_s))
        elif row.kind == "fact":
            num_facts += 1
            fact: Any = row.value
            scheduler.observe(fact, row.now_s)
        if difference:
            break
    return ReplayResult(
        num_facts=num_facts,
        num_plans=num_plans,
        num_commands=num_commands,
        difference=difference,
    )


def _difference(row: Row, told: Plan, now: Plan) -> str:
    if told == now:
        return ""
    where = f"row {row.seq} at {row.now_s:.3f} s"
    for place, (old, new) in enumerate(zip(told.commands, now.commands, strict=False)):
        if old != new:
            return f"{where}, command {place}: the run has {old}, replay gives {new}"
    if len(told.commands) != len(now.commands):
        count = f"{len(told.commands)} commands, replay gives {len(now.commands)}"
        return f"{where}: the run has {count}"
    return f"{where}: the run waited for {told.waiting_for}, replay for {now.waiting_for}"
