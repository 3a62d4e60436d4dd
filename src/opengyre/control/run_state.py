"""Everything the scheduler knows, in one place; the rules are functions over it.

Owns: RunState and the few reads every rule needs. Must not know: any rule.
Invariants: w is dispatched - finished; capacity counts engines in role rollout that are neither
absent nor quarantined, and not a restarted core on its way back to training.
"""

from collections import deque
from dataclasses import dataclass, field

from opengyre.control.bursts import Burst
from opengyre.control.cells import Cell, CellRole, Engine, EngineState
from opengyre.control.config import SchedulerConfig
from opengyre.control.counts import Counts
from opengyre.control.executions import ExecutionBook
from opengyre.control.facts import Outcome
from opengyre.control.groups import Group, GroupBook
from opengyre.control.ids import CommandId, EngineId
from opengyre.control.outbox import Outbox
from opengyre.control.step_record import Redo, StepRecord, StepState
from opengyre.control.supply import SupplyTimer
from opengyre.control.transition import Transition

CORE = 0


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
    engines: dict[EngineId, Engine]
    cells: list[Cell]
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
    transition: Transition | None = None
    ending: Ending | None = None
    undurable: list[Committed] = field(default_factory=list)
    redo: deque[Redo] = field(default_factory=deque)
    refused: dict[str, int] = field(default_factory=dict)
    num_by_outcome: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    steps_done: int = 0
    num_short_steps: int = 0
    num_empty_steps: int = 0
    num_core_losses: int = 0
    is_core_wanted: bool = False
    checkpoint: CommandId | None = None
    expose: CommandId | None = None
    abandon: CommandId | None = None
    reroute: CommandId | None = None
    is_exposed: bool = False
    steps_to_abandon: list[tuple[int, str]] = field(default_factory=list)
    failure: str | None = None
    why_stays: str | None = None
    stop_reason: str | None = None
    not_before_s: float = 0.0
    reroute_not_before_s: float = 0.0
    short_since_s: float | None = None
    stuck_since_s: float | None = None
    is_dirty: bool = False

    @property
    def waterlevel(self) -> int:
        return self.counts.waterlevel

    @property
    def core(self) -> Cell:
        return self.cells[CORE]

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

    def serves(self, engine: Engine) -> bool:
        """True if its slots count in the capacity C_R."""
        if engine.state in (EngineState.ABSENT, EngineState.QUARANTINED):
            return False
        if engine.cell == CORE and self.is_core_wanted:
            return False
        return engine.cell is None or self.cells[engine.cell].role is CellRole.ROLLOUT

    @property
    def capacity(self) -> int:
        slots = 0
        for engine in self.engines.values():
            if engine.state is EngineState.ABSENT or engine.state is EngineState.QUARANTINED:
                continue
            if engine.cell is None or self.cells[engine.cell].role is CellRole.ROLLOUT:
                slots += engine.slots
        if self.is_core_wanted and self.core.role is CellRole.ROLLOUT:
            slots -= self.engine_of(self.core).slots
        return slots

    def engine_of(self, cell: Cell) -> Engine:
        return self.engines[cell.engine]

    @property
    def is_last_step_closing(self) -> bool:
        step = self.step
        is_closing = step is not None and step.state is StepState.CLOSING
        return is_closing and self.burst.num_left <= 1


def new_run_state(config: SchedulerConfig) -> RunState:
    """Nothing is up yet. Standalone engines stay longest, then cells from the last to the core."""
    engines = {}
    for index, spec in enumerate(config.engines):
        stay = index if spec.cell is None else len(config.engines) + config.num_cells - spec.cell
        engines[spec.engine] = Engine(
            engine=spec.engine, slots=spec.slots, cell=spec.cell, stay=stay
        )
    by_cell = {spec.cell: spec.engine for spec in config.engines if spec.cell is not None}
    return RunState(
        config=config,
        engines=engines,
        cells=[Cell(cell=number, engine=by_cell[number]) for number in range(config.num_cells)],
        supply=SupplyTimer(hold_s=config.supply_hold_s),
        version=config.initial_version,
        published_version=config.initial_version,
        durable_version=config.initial_version,
    )
