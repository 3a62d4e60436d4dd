"""The naive model: what a list of facts and commands means, in the words of the design.

Owns: the questions that the rules ask. Must not know: the scheduler's inside, how an event
changes a life.
Invariant: no number is kept; each is counted anew from the lives of the things it counts.
"""

from collections import Counter
from dataclasses import dataclass, field
from statistics import pstdev

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.cells import CellRole
from opengyre.control.config import PolicyName, SchedulerConfig
from opengyre.control.ids import EngineId, ExecutionId, GroupId
from opengyre.trajectory.advantages import MIN_STD
from tests.sim.control_lives import (
    Commit,
    EngineLife,
    ExecutionLife,
    GroupLife,
    Sample,
    StepLife,
)

CORE = EngineId("c0")


@dataclass(kw_only=True)
class Truth:
    """What a list of events adds up to."""

    config: SchedulerConfig
    executions: dict[ExecutionId, ExecutionLife] = field(default_factory=dict)
    groups: dict[GroupId, GroupLife] = field(default_factory=dict)
    engines: dict[EngineId, EngineLife] = field(default_factory=dict)
    commands: dict[int, c.AnyCommand] = field(default_factory=dict)
    unanswered: dict[int, c.AnyCommand] = field(default_factory=dict)
    sources: dict[int, dict[ExecutionId, EngineId | None]] = field(default_factory=dict)
    eval_waves: list[tuple[float, tuple[ExecutionId, ...]]] = field(default_factory=list)
    ended_groups: list[tuple[GroupId, bool]] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    undone: dict[int, Commit] = field(default_factory=dict)
    interrupted: dict[int, frozenset[GroupId]] = field(default_factory=dict)
    step: StepLife | None = None
    is_core_wanted: bool = False
    is_exposing: bool = False
    steps_before_burst: int = 0
    durable_step: int = 0
    durable_version: int = 0
    exposed: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures_s: list[float] = field(default_factory=list)
    core_losses_s: list[float] = field(default_factory=list)
    losses_s: list[float] = field(default_factory=list)
    fatal: list[str] = field(default_factory=list)
    failed_drops: Counter[tuple[int, int]] = field(default_factory=Counter)
    stop: f.StopRequested | None = None
    end: c.EndRun | None = None
    over_since_s: float | None = None
    now_s: float = 0.0

    # ---- numbers, counted anew

    @property
    def version(self) -> int:
        return self.commits[-1].version if self.commits else self.durable_version

    @property
    def w(self) -> int:
        return sum(one.outcome is None for one in self.executions.values())

    @property
    def queued(self) -> list[ExecutionLife]:
        lives = self.executions.values()
        return [one for one in lives if not one.is_launched and one.outcome is None]

    @property
    def displaced(self) -> list[ExecutionLife]:
        return [one for one in self.executions.values() if one.is_displaced]

    def used(self, engine: EngineId) -> int:
        return sum(one.place == engine for one in self.executions.values())

    def has_ended(self, group: GroupLife) -> bool:
        lives = [self.executions[member] for member in group.members]
        return all(one.outcome is not None and one.is_valid is not None for one in lives)

    def is_trainable(self, group: GroupLife) -> bool:
        num_valid = sum(bool(self.executions[member].is_valid) for member in group.members)
        return num_valid >= self.config.min_valid_members

    def is_filtered(self, group: GroupLife) -> bool:
        lives = [self.executions[member] for member in group.members]
        values = [one.value for one in lives if one.is_valid and one.value is not None]
        return self.config.filter_zero_variance and pstdev(values) < MIN_STD

    def state(self, group: GroupLife) -> str:
        if group.consumed_by is not None:
            return "consumed"
        if group.assigned_to is not None:
            return "assigned"
        if group.is_dropped:
            return "dropped"
        if not self.has_ended(group):
            return "live"
        if not self.is_trainable(group):
            return "void"
        return "filtered" if self.is_filtered(group) else "ready"

    def of_state(self, *states: str) -> list[GroupLife]:
        return [one for one in self.groups.values() if self.state(one) in states]

    @property
    def outstanding(self) -> list[GroupLife]:
        return self.of_state("live", "ready", "assigned")

    def deadline(self, group: GroupLife) -> int:
        """The last version at which a step may train it."""
        return group.version + self.config.staleness_bound

    def overdue(self) -> list[GroupLife]:
        """Groups no step may train any more; those of a redo are trained again whatever comes."""
        kept = {name for commit in self.undone.values() for name in commit.groups}
        groups = [one for one in self.of_state("live", "ready") if one.group not in kept]
        return [one for one in groups if self.version > self.deadline(one)]

    @property
    def need(self) -> int:
        """Rule 4; a redo of a committed step takes its groups and no others."""
        step, assigned = self.step, self.of_state("assigned")
        if step is not None and step.is_exact:
            return len(step.fixed) - len(assigned)
        can_come = len(self.of_state("live", "ready"))
        return min(self.config.groups_per_step - len(assigned), can_come)

    def is_late(self, engine: EngineLife) -> bool:
        """2.5.4; once the run ends nobody looks any more."""
        now_s = self.now_s if self.over_since_s is None else self.over_since_s
        return engine.is_late(now_s, self.config.publish_timeout_s)

    def quarantined(self) -> list[EngineId]:
        return [name for name, one in self.engines.items() if self.is_late(one)]

    def counts_in_capacity(self, engine: EngineLife) -> bool:
        """Slots count in C_R; a core that died in training goes back there with its door shut, and
        cells that always train never open theirs."""
        if engine.spec.cell is not None and engine.spec.cell < self.config.num_training_cells:
            return False
        is_rollout = engine.spec.cell is None or engine.role is CellRole.ROLLOUT
        if engine.spec.cell == 0 and self.is_core_wanted:
            return False
        return engine.is_alive and is_rollout and not self.is_late(engine)

    @property
    def capacity(self) -> int:
        """C_R: slots of engines whose role is rollout and that are not quarantined."""
        lives = self.engines.values()
        return sum(one.spec.slots for one in lives if self.counts_in_capacity(one))

    @property
    def cells(self) -> list[EngineLife]:
        lives = [one for one in self.engines.values() if one.spec.cell is not None]
        return sorted(lives, key=lambda one: one.spec.cell or 0)

    def with_role(self, *roles: CellRole) -> list[EngineLife]:
        return [one for one in self.cells if one.role in roles]

    @property
    def next_cells(self) -> list[EngineLife]:
        """Rules 8 and 13: the cells that leave rollout next, together; [] if none can."""
        core = self.engines[CORE]
        if not core.is_alive or self.config.policy is PolicyName.ASYNC:
            return []
        in_order = [one for one in self.cells if one.is_alive and not one.left_order]
        if self.config.policy is PolicyName.COLOCATE:
            away = (CellRole.TRAINING, CellRole.RETURNING)
            return [one for one in in_order if one.role not in away]
        return [one for one in in_order if one.role is not CellRole.TRAINING][:1]

    @property
    def num_steps_left(self) -> int:
        """Of the burst."""
        config, first = self.config, self.steps_before_burst
        num_steps = min(config.steps_per_burst, config.num_steps - first)
        return num_steps - sum(commit.step > first for commit in self.commits)

    def is_whole_supply(self) -> bool:
        """Without streaming: all is ready that the step, or under colocate the burst, can get."""
        wanted, num_ready = self.need, len(self.of_state("ready"))
        if self.config.policy is PolicyName.COLOCATE:
            num_places = self.num_steps_left * self.config.groups_per_step
            num_places -= len(self.of_state("assigned"))
            wanted = min(num_places, num_ready + len(self.of_state("live")))
        return num_ready >= max(1, wanted)

    def is_supplied(self, *, is_core: bool) -> bool:
        """Rule 7c, now."""
        if not self.config.is_streaming and self.is_whole_supply():
            return True
        num_ready = len(self.of_state("ready"))
        num_free = self.config.groups_per_step - len(self.of_state("assigned"))
        wanted = self.config.supply_fraction * self.config.groups_per_step
        if self.config.is_streaming and min(num_ready, num_free) >= wanted:
            return True
        is_serving = self.engines[CORE].role is CellRole.ROLLOUT
        return is_core and is_serving and not self.of_state("live") and num_ready >= 1

    def supplied_since_s(self, *, is_core: bool) -> float | None:
        """The start of the unbroken time for which 7c held; a step that opens restarts it."""
        since_s = None
        for sample in reversed(self.samples):
            if not (sample.is_supplied_for_core if is_core else sample.is_supplied):
                return since_s
            since_s = sample.now_s
            if sample.has_opened_a_step:
                return since_s
        return since_s

    def short_since_s(self) -> float | None:
        """Since when C_R < w without a break and without a change of roles."""
        since_s = None
        for sample in reversed(self.samples):
            if not sample.is_short:
                return since_s
            since_s = sample.now_s
            if sample.has_changed_roles:
                return since_s
        return since_s

    def voids_in_a_row(self) -> int:
        longest = run = 0
        for _, is_ready in self.ended_groups:
            run = 0 if is_ready else run + 1
            longest = max(longest, run)
        return longest


def new_truth(config: SchedulerConfig) -> Truth:
    """Before anything happened."""
    truth = Truth(config=config, durable_version=config.initial_version)
    truth.engines = {spec.engine: EngineLife(spec=spec) for spec in config.engines}
    return truth
