"""The naive model: what a list of facts and commands means, in the words of the design.

Owns: the lives of executions, groups, engines, cells, steps and versions. Must not know: the
scheduler's inside; it never looks at it.
Invariant: no number is kept; each is counted anew from the lives of the things it counts.
"""

from dataclasses import dataclass, field

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.cells import CellRole
from opengyre.control.config import EngineSpec, SchedulerConfig
from opengyre.control.ids import EngineId, ExecutionId, GroupId

CORE = EngineId("c0")
ROUNDING_S = 1e-9


@dataclass(slots=True, kw_only=True)
class ExecutionLife:
    """`is_valid` None: no last word of the grader yet. `place` None: queued, displaced or over."""

    execution: ExecutionId
    group: GroupId | None
    is_launched: bool = False
    place: EngineId | None = None
    outcome: f.Outcome | None = None
    is_valid: bool | None = None
    cancelled_s: float | None = None

    @property
    def is_displaced(self) -> bool:
        return self.is_launched and self.outcome is None and self.place is None


@dataclass(slots=True, kw_only=True)
class GroupLife:
    group: GroupId
    version: int
    members: tuple[ExecutionId, ...]
    assigned_to: int | None = None
    consumed_by: int | None = None
    is_dropped: bool = False


@dataclass(slots=True, kw_only=True)
class EngineLife:
    """`due_since_s` is set while a publication is not verified."""

    spec: EngineSpec
    is_alive: bool = False
    role: CellRole = CellRole.ABSENT
    verified: int | None = None
    due: int | None = None
    due_since_s: float | None = None
    is_door_open: bool = False
    has_died: bool = False
    is_turning: bool = False

    @property
    def left_order(self) -> bool:
        """A satellite that died is no member until the next boundary; the core always is one."""
        return self.has_died and self.spec.cell != 0

    def is_late(self, now_s: float, limit_s: float) -> bool:
        return self.due_since_s is not None and now_s - self.due_since_s >= limit_s - ROUNDING_S


@dataclass(slots=True, kw_only=True)
class StepLife:
    """`fixed` are the groups of an earlier life of this step that its core's death undid."""

    step: int
    version: int
    is_open: bool = False
    is_closing: bool = False
    offered: tuple[GroupId, ...] = ()
    fixed: frozenset[GroupId] = frozenset()
    is_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    step: int
    version_before: int
    version: int
    groups: frozenset[GroupId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the supply test and the capacity test saw after one event."""

    now_s: float
    is_supplied: bool
    is_supplied_for_core: bool
    is_short: bool
    has_opened_a_step: bool
    has_changed_roles: bool


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
    durable_step: int = 0
    durable_version: int = 0
    exposed: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures_s: list[float] = field(default_factory=list)
    core_losses_s: list[float] = field(default_factory=list)
    losses_s: list[float] = field(default_factory=list)
    fatal: list[str] = field(default_factory=list)
    stop: f.StopRequested | None = None
    end: c.EndRun | None = None
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

    def state(self, group: GroupLife) -> str:
        if group.consumed_by is not None:
            return "consumed"
        if group.assigned_to is not None:
            return "assigned"
        if group.is_dropped:
            return "dropped"
        if not self.has_ended(group):
            return "live"
        return "ready" if self.is_trainable(group) else "void"

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

    def quarantined(self) -> list[EngineId]:
        limit_s = self.config.publish_timeout_s
        return [name for name, one in self.engines.items() if one.is_late(self.now_s, limit_s)]

    def counts_in_capacity(self, engine: EngineLife) -> bool:
        """Slots count in C_R; a core that died in training goes back there with its door shut."""
        is_rollout = engine.spec.cell is None or engine.role is CellRole.ROLLOUT
        if engine.spec.cell == 0 and self.is_core_wanted:
            return False
        is_late = engine.is_late(self.now_s, self.config.publish_timeout_s)
        return engine.is_alive and is_rollout and not is_late

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
    def next_cell(self) -> EngineLife | None:
        """Rule 8: the first living cell of the order that is not in training; the core always
        first, and back in the order as soon as it lives again."""
        if not self.engines[CORE].is_alive:
            return None
        for cell in self.cells:
            if cell.is_alive and not cell.left_order and cell.role is not CellRole.TRAINING:
                return cell
        return None

    def is_supplied(self, *, is_core: bool) -> bool:
        """Rule 7c, now."""
        num_ready = len(self.of_state("ready"))
        num_free = self.config.groups_per_step - len(self.of_state("assigned"))
        wanted = self.config.supply_fraction * self.config.groups_per_step
        if min(num_ready, num_free) >= wanted:
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


def add(truth: Truth, now_s: float, body: f.Fact | c.AnyCommand) -> None:
    """One more thing that happened: a fact that was true, or a command that was given."""
    truth.now_s = now_s
    roles = [one.role for one in truth.cells]
    if isinstance(body, c.Command):
        truth.commands[body.command_id] = body  # type: ignore[assignment]
        truth.unanswered[body.command_id] = body  # type: ignore[assignment]
        _commanded(truth, body)
    else:
        _told(truth, body)
    _note_ends(truth)
    is_opened = isinstance(body, f.CommandApplied) and isinstance(
        truth.commands[body.command_id], c.OpenStep
    )
    truth.samples.append(
        Sample(
            now_s=truth.now_s,
            is_supplied=truth.is_supplied(is_core=False),
            is_supplied_for_core=truth.is_supplied(is_core=True),
            is_short=truth.capacity < truth.w,
            has_opened_a_step=is_opened,
            has_changed_roles=roles != [one.role for one in truth.cells],
        )
    )


def pass_time(truth: Truth, now_s: float) -> None:
    """2.5.4: an engine that is late with its version leaves C_R, its executions are displaced."""
    truth.now_s = now_s
    late = truth.quarantined()
    for life in truth.executions.values():
        if life.place in late:
            life.place = None


def pass_boundary(truth: Truth) -> None:
    """Cells that died in the burst and live again are members again."""
    truth.is_exposing = False
    for cell in truth.cells:
        cell.has_died = not cell.is_alive
        cell.is_turning = cell.role is CellRole.LEAVING


def _note_ends(truth: Truth) -> None:
    ended = {group for group, _ in truth.ended_groups}
    for group in truth.groups.values():
        if group.group not in ended and not group.is_dropped and truth.has_ended(group):
            truth.ended_groups.append((group.group, truth.is_trainable(group)))


# ---- commands


def _commanded(truth: Truth, command: c.Command) -> None:
    match command:
        case c.DispatchGroups() | c.DispatchEval():
            _dispatched(truth, command)
        case c.Launch():
            life = truth.executions[command.execution]
            life.is_launched, life.place = True, command.engine
        case c.Cancel():
            _cancelled(truth, command)
        case c.Reroute():
            _rerouted(truth, command)
        case c.EndRun():
            truth.end = command
        case _:
            _commanded_engine(truth, command)


def _dispatched(truth: Truth, command: c.DispatchGroups | c.DispatchEval) -> None:
    if isinstance(command, c.DispatchEval):
        truth.eval_waves.append((truth.now_s, command.executions))
        for one in command.executions:
            truth.executions[one] = ExecutionLife(execution=one, group=None)
        return
    for group, members in command.groups:
        truth.groups[group] = GroupLife(group=group, version=command.version, members=members)
        for one in members:
            truth.executions[one] = ExecutionLife(execution=one, group=group)


def _rerouted(truth: Truth, command: c.Reroute) -> None:
    lives = {one: truth.executions[one] for one, _ in command.moves}
    truth.sources[command.command_id] = {one: life.place for one, life in lives.items()}
    for one, engine in command.moves:
        if lives[one].outcome is None:
            lives[one].place = engine


def _cancelled(truth: Truth, command: c.Cancel) -> None:
    life = truth.executions[command.execution]
    life.cancelled_s = truth.now_s
    if command.was_queued:
        life.is_launched, life.outcome, life.is_valid = True, f.Outcome.CANCELLED, False


def _commanded_engine(truth: Truth, command: c.Command) -> None:
    match command:
        case c.CloseDoor():
            engine = truth.engines[command.engine]
            engine.role, engine.is_door_open = CellRole.LEAVING, False
            engine.is_turning = False
        case c.OpenDoor():
            _serves(truth.engines[command.engine])
        case c.Publish():
            engine = truth.engines[command.engine]
            _serves(engine)
            engine.due, engine.due_since_s, engine.is_door_open = (
                command.version,
                truth.now_s,
                False,
            )
        case c.Fence():
            _lost(truth, command.engine)
        case c.EnterTraining():
            engine = truth.cells[command.cell]
            engine.role, engine.is_door_open = CellRole.LEAVING, False
            truth.is_core_wanted &= command.cell != 0
        case c.LeaveTraining():
            engine = truth.cells[command.cell]
            engine.role, engine.is_door_open = CellRole.RETURNING, False
            engine.due = command.version
        case _:
            _commanded_step(truth, command)


def _serves(engine: EngineLife) -> None:
    if engine.spec.cell is not None:
        engine.role = CellRole.ROLLOUT


def _commanded_step(truth: Truth, command: c.Command) -> None:
    match command:
        case c.OpenStep():
            undone = truth.undone.get(command.step)
            fixed = truth.interrupted.get(command.step, frozenset())
            truth.step = StepLife(
                step=command.step,
                version=command.version,
                fixed=fixed if undone is None else undone.groups,
                is_exact=undone is not None,
            )
        case c.Offer() if truth.step is not None:
            truth.step.offered = command.groups
        case c.CloseStep() if truth.step is not None:
            truth.step.is_closing = True
        case c.AbandonStep():
            _unassign(truth)
            truth.step = None
        case c.Expose():
            truth.is_exposing = True
        case _:
            return


def _unassign(truth: Truth) -> None:
    for group in truth.of_state("assigned"):
        group.assigned_to = None


# ---- facts


def _told(truth: Truth, fact: f.Fact) -> None:
    match fact:
        case f.EngineReady():
            _lost(truth, fact.engine)
            engine = truth.engines[fact.engine]
            engine.is_alive, engine.verified, engine.due = True, fact.version, fact.version
            engine.due_since_s = None
            _serves(engine)
        case f.EngineLost():
            _lost(truth, fact.engine)
        case f.ExecutionClosed():
            life = truth.executions[fact.execution]
            life.outcome, life.place = fact.outcome, None
        case f.VerdictGiven():
            truth.executions[fact.execution].is_valid = fact.reward is not None
        case f.StopRequested():
            truth.stop = truth.stop or fact
        case f.CommandApplied():
            _applied(truth, truth.commands[fact.command_id])
            truth.unanswered.pop(fact.command_id, None)
        case f.CommandFailed() | f.CommandUnknown():
            _failed(truth, fact)
            truth.unanswered.pop(fact.command_id, None)
        case _:
            _told_step(truth, fact)


def _told_step(truth: Truth, fact: f.Fact) -> None:
    match fact:
        case f.GroupAssigned():
            truth.groups[fact.group].assigned_to = fact.step
        case f.GroupReturned():
            if truth.step is not None and not truth.step.is_closing:
                truth.groups[fact.group].assigned_to = None
        case f.StepCommitted():
            _committed(truth, fact)
        case _:
            return


def _committed(truth: Truth, fact: f.StepCommitted) -> None:
    assert truth.step is not None
    groups = truth.of_state("assigned")
    for group in groups:
        group.assigned_to, group.consumed_by = None, fact.step
    truth.commits.append(
        Commit(
            step=fact.step,
            version_before=truth.step.version,
            version=fact.version,
            groups=frozenset(group.group for group in groups),
        )
    )
    truth.undone.pop(fact.step, None)
    truth.interrupted.pop(fact.step, None)
    truth.step = None


def _lost(truth: Truth, name: EngineId) -> None:
    engine = truth.engines[name]
    if not engine.is_alive:
        return
    is_burst_on = bool(truth.with_role(CellRole.TRAINING)) or truth.is_core_wanted
    if name == CORE and is_burst_on:
        truth.is_core_wanted = not truth.is_exposing
    engine.is_alive, engine.role = False, CellRole.ABSENT
    engine.verified = engine.due = engine.due_since_s = None
    engine.is_door_open = False
    engine.has_died = True
    truth.losses_s.append(truth.now_s)
    for life in truth.executions.values():
        if life.place == name:
            life.place = None
    if name == CORE:
        _lost_core(truth)


def _lost_core(truth: Truth) -> None:
    """What was not durable is undone: its groups are trained again in the same steps."""
    truth.core_losses_s.append(truth.now_s)
    if truth.step is not None:
        assigned = frozenset(group.group for group in truth.of_state("assigned"))
        if truth.step.step not in truth.undone:
            truth.interrupted[truth.step.step] = assigned
    _unassign(truth)
    truth.step = None
    for commit in [one for one in truth.commits if one.step > truth.durable_step]:
        truth.commits.remove(commit)
        truth.undone[commit.step] = commit
        for name in commit.groups:
            truth.groups[name].consumed_by = None


def _applied(truth: Truth, command: c.AnyCommand) -> None:
    match command:
        case c.OpenDoor():
            engine = truth.engines[command.engine]
            engine.is_door_open = engine.due_since_s is None
        case c.Publish():
            engine = truth.engines[command.engine]
            engine.verified = command.version
            if engine.due == command.version:
                engine.due_since_s, engine.is_door_open = None, True
        case c.EnterTraining():
            truth.cells[command.cell].role = CellRole.TRAINING
        case c.LeaveTraining():
            engine = truth.cells[command.cell]
            engine.role, engine.verified = CellRole.ROLLOUT, command.version
        case c.OpenStep():
            if truth.step is not None:
                truth.step.is_open = True
        case c.Checkpoint():
            truth.durable_step, truth.durable_version = command.step, command.version
        case c.Expose():
            truth.exposed.append(command.version)
        case _:
            return


def _failed(truth: Truth, fact: f.CommandFailed | f.CommandUnknown) -> None:
    command = truth.commands[fact.command_id]
    truth.failures_s.append(truth.now_s)
    match command:
        case c.Launch() if isinstance(fact, f.CommandFailed):
            life = truth.executions[command.execution]
            life.outcome, life.is_valid, life.place = f.Outcome.FAILED, False, None
        case c.Reroute():
            _reroute_failed(truth, command, is_unknown=isinstance(fact, f.CommandUnknown))
        case c.DispatchGroups() | c.DispatchEval() | c.Checkpoint() | c.Offer():
            truth.fatal.append(f"{type(command).__name__} failed")
        case _:
            return


def _reroute_failed(truth: Truth, command: c.Reroute, *, is_unknown: bool) -> None:
    """Back at the source if that is still there, else displaced; nobody knows: placed anew."""
    for one, engine in command.moves:
        life = truth.executions[one]
        if life.place != engine:
            continue
        source = truth.sources[command.command_id][one]
        is_there = source is not None and truth.engines[source].is_alive and not is_unknown
        life.place = source if is_there else None
