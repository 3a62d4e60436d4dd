"""Everything the scheduler knows, in one place; the rules are functions over it.

Owns: RunState and the few reads every rule needs. Must not know: any rule.
Invariants: w is dispatched - finished; capacity counts engines in role rollout that are neither
absent nor quarantined, and no cell that is bound for training.
"""

from collections import deque
from dataclasses import dataclass, field

from opengyre.control.bursts import Burst
from opengyre.control.cells import Cell, Engine
from opengyre.control.config import SchedulerConfig
from opengyre.control.counts import Counts
from opengyre.control.executions import ExecutionBook
from opengyre.control.facts import Outcome
from opengyre.control.groups import Group, GroupBook
from opengyre.control.ids import CommandId, EngineId
from opengyre.control.outbox import Outbox
from opengyre.control.policies import POLICIES, Policy
from opengyre.control.step_record import Redo, StepRecord, StepState
from opengyre.control.supply import SupplyTimer
from opengyre.control.topology import Topology
from opengyre.control.transition import Transition


@dataclass(slots=True, kw_only=True)
class Ending:
    """Why the run ends; `deadline_s` bounds the wait for cancelled executions."""

    is_failed: bool
    reason: str
    deadline_s: float


@dataclass(slots=True, kw_only=True)
class Committed:
    """A committed step whose checkpoint is not durable yet."""

    step: int
    groups: tuple[Group, ...]
    is_short: bool


@dataclass(slots=True, kw_only=True)
class RunState:
    config: SchedulerConfig
    policy: Policy
    topology: Topology
    supply: SupplyTimer
    version: int
    published_version: int
    durable_version: int
    counts: Counts = field(default_factory=Counts)
    groups: GroupBook = field(default_factory=GroupBook)
    executions: ExecutionBook = field(default_factory=ExecutionBook)
    outbox: Outbox = field(default_factory=Outbox)
    burst: Burst = field(default_factory=Burst)
    step: StepRecord | None = None
    transitions: dict[int, Transition] = field(default_factory=dict)
    ending: Ending | None = None
    undurable: list[Committed] = field(default_factory=list)
    redo: deque[Redo] = field(default_factory=deque)
    refused: dict[str, int] = field(default_factory=dict)
    num_by_outcome: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    steps_done: int = 0
    num_short_steps: int = 0
    num_empty_steps: int = 0
    num_core_losses: int = 0
    checkpoint: CommandId | None = None
    expose: CommandId | None = None
    abandon: CommandId | None = None
    reroute: CommandId | None = None
    is_exposed: bool = False
    steps_to_abandon: list[tuple[int, str]] = field(default_factory=list)
    failure: str | None = None
    why_stays: str | None = None
    next_cells: tuple[int, tuple[Cell, ...]] = (-1, ())
    stop_reason: str | None = None
    not_before_s: float = 0.0
    reroute_not_before_s: float = 0.0
    short_since_s: float | None = None
    stuck_since_s: float | None = None
    publish_deadlines: list[tuple[float, int, EngineId]] = field(default_factory=list)
    is_dirty: bool = False

    @property
    def waterlevel(self) -> int:
        return self.counts.waterlevel

    @property
    def engines(self) -> dict[EngineId, Engine]:
        return self.topology.engines

    @property
    def cells(self) -> list[Cell]:
        return self.topology.cells

    @property
    def core(self) -> Cell:
        return self.topology.core

    @property
    def capacity(self) -> int:
        return self.topology.capacity

    @property
    def steps_left(self) -> int:
        return self.config.num_steps - self.steps_done

    @property
    def num_assigned(self) -> int:
        return 0 if self.step is None else len(self.step.assigned)

    @property
    def need(self) -> int:
        """Groups the open step (or the next one) still needs; 0 closes it (rule 4)."""
        if self.step is not None and self.step.is_exact:
            return len(self.step.fixed or ()) - self.num_assigned
        missing = self.config.groups_per_step - self.num_assigned
        return min(missing, self.groups.num_ready + self.groups.num_live)

    def refuse(self, why: str) -> None:
        """A late, doubled or fenced fact: counted, without effect."""
        self.refused[why] = self.refused.get(why, 0) + 1

    def engine_of(self, cell: Cell) -> Engine:
        return self.topology.engine_of(cell)

    @property
    def is_last_step_closing(self) -> bool:
        step = self.step
        is_closing = step is not None and step.state is StepState.CLOSING
        return is_closing and self.burst.num_left <= 1


def new_run_state(config: SchedulerConfig) -> RunState:
    """Nothing is up yet."""
    policy = POLICIES[config.policy]
    return RunState(
        config=config,
        policy=policy,
        topology=Topology(config, num_fixed=policy.num_fixed(config)),
        supply=SupplyTimer(hold_s=config.supply_hold_s),
        version=config.initial_version,
        published_version=config.initial_version,
        durable_version=config.initial_version,
    )
