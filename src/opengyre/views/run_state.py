"""What is known of a run at one moment of its journal: executions, groups, engines, levels.

Owns: the state that `fold` fills and every view reads. Must not know: how rows change it.
Invariant: every count is recomputed from ids, never taken from a row.
"""

import math
from dataclasses import dataclass, field

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.groups import GroupState, is_without_variance
from opengyre.seams.records import TurnRecord
from opengyre.store import observations as seen
from opengyre.store.observations import Activity, Role
from opengyre.views.lanes import Stretch, overlay, totals


@dataclass(slots=True, kw_only=True)
class ExecutionView:
    """`outcome` is the first one told; `other_outcomes` what was told later and refused. `value` is
    what its group compares; None: it is not valid, `exclusion` says why if it has a reward. Turns
    are numbered; those up to `num_given_up_turns` are of earlier launches."""

    execution: str
    group: str | None
    version: int
    burst: int
    dispatched_s: float
    task: str = ""
    engine: str | None = None
    launched_s: float | None = None
    closed_s: float | None = None
    outcome: f.Outcome | None = None
    other_outcomes: list[f.Outcome] = field(default_factory=list)
    reward: float | None = None
    value: float | None = None
    exclusion: str = ""
    verdict_reason: str = ""
    has_last_word: bool = False
    num_launches: int = 0
    last_turn: int = 0
    num_given_up_turns: int = 0


@dataclass(slots=True, kw_only=True)
class GroupView:
    """`num_open` members have not closed with a last word; `assigned_step` None until claimed.
    `lowest` and `highest` are the bounds of the valid members' values."""

    group: str
    version: int
    burst: int
    members: tuple[str, ...]
    num_open: int
    num_valid: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    assigned_step: int | None = None
    is_consumed: bool = False


@dataclass(slots=True, kw_only=True)
class EngineView:
    """`cell` None: standalone. `live`: executions whose slot is here."""

    engine: str
    cell: int | None
    slots: int
    role: Role = Role.STARTING
    always_trains: bool = False
    is_quarantined: bool = False
    is_publishing: bool = False
    publishing_since_s: float = 0.0
    due_version: int = 0
    incarnation: int = 0
    live: set[str] = field(default_factory=set)
    lane: list[Stretch] = field(default_factory=list)

    @property
    def counts_for_capacity(self) -> bool:
        return self.role is Role.ROLLOUT and not self.is_quarantined and not self.always_trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The run's levels from `at_s` on."""

    at_s: float
    waterlevel: int
    capacity: int
    num_ready: int
    num_needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One thing worth a mark: join, move, publication, continued, retained, returned, lost."""

    at_s: float
    what: str
    where: str
    words: str


@dataclass(slots=True, kw_only=True)
class Counts:
    dispatched: int = 0
    launched: int = 0
    finished: int = 0

    @property
    def waterlevel(self) -> int:
        return self.dispatched - self.finished


class RunState:
    """Filled by `Fold`; read only elsewhere. `open_groups`: not consumed, void or filtered."""

    def __init__(self) -> None:
        self.started: seen.RunStarted | None = None
        self.ended: seen.RunEnded | None = None
        self.now_s = 0.0
        self.counts = Counts()
        self.executions: dict[str, ExecutionView] = {}
        self.groups: dict[str, GroupView] = {}
        self.open_groups: dict[str, GroupView] = {}
        self.engines: dict[str, EngineView] = {}
        self.commands: dict[int, c.AnyCommand] = {}
        self.burst = 0
        self.open_step: int | None = None
        self.is_closing_step = False
        self.is_ending = False
        self.steps: list[seen.StepReport] = []
        self.evals: list[tuple[float, seen.EvalResult]] = []
        self.continued: list[tuple[float, seen.Continued]] = []
        self.handoffs: dict[str, list[seen.Handoff]] = {}
        self.published: list[tuple[float, seen.VersionPublished]] = []
        self.harness_errors: list[seen.HarnessError] = []
        self.gateways_lost: list[seen.GatewayLost] = []
        self.retold: set[tuple[str, int]] = set()
        self.turns: dict[tuple[str, int], TurnRecord] = {}
        self.joins: list[tuple[float, seen.MemberJoined]] = []
        self.samples: list[Sample] = []
        self.happenings: list[Happening] = []
        self.num_role_changes = 0
        self.role_changes: list[seen.RoleChange] = []
        self.num_retained = 0
        self.num_returned = 0
        self.measured: dict[str, list[Stretch]] = {}
        self.micro_steps: dict[str, list[Stretch]] = {}

    # ---- levels

    @property
    def capacity(self) -> int:
        """C_R: slots of engines in rollout that are not quarantined."""
        return sum(one.slots for one in self.engines.values() if one.counts_for_capacity)

    @property
    def num_assigned(self) -> int:
        return sum(one.assigned_step is not None for one in self.open_groups.values())

    @property
    def num_ready(self) -> int:
        return sum(map(self.is_ready, self.open_groups.values()))

    @property
    def num_needed(self) -> int:
        """Groups the open step may still take: min(B - assigned, ready + live)."""
        if self.started is None or self.open_step is None:
            return 0
        num_assigned = self.num_assigned
        num_unassigned = len(self.open_groups) - num_assigned
        return min(self.started.groups_per_step - num_assigned, num_unassigned)

    def is_ready(self, group: GroupView) -> bool:
        return self.group_state(group) is GroupState.READY

    def group_state(self, group: GroupView) -> GroupState:
        """Where it stands; a group that was dropped shows what its members came to."""
        if group.is_consumed:
            return GroupState.CONSUMED
        if group.assigned_step is not None:
            return GroupState.ASSIGNED
        if group.num_open > 0:
            return GroupState.LIVE
        return self.ended_state(group)

    def ended_state(self, group: GroupView) -> GroupState:
        """What became of it as its last member ended: ready, void or filtered."""
        if group.num_valid < self._min_valid:
            return GroupState.VOID
        is_flat = is_without_variance(group.lowest, group.highest)
        return GroupState.FILTERED if self._is_filtering and is_flat else GroupState.READY

    def engine_of_cell(self, cell: int) -> EngineView:
        """Made without slots if the journal never named it."""
        for one in self.engines.values():
            if one.cell == cell:
                return one
        engine = EngineView(engine=f"c{cell}", cell=cell, slots=0)
        self.engines[engine.engine] = engine
        return engine

    def engine(self, name: str) -> EngineView:
        if name not in self.engines:
            self.engines[name] = EngineView(engine=name, cell=None, slots=0)
        return self.engines[name]

    @property
    def _min_valid(self) -> int:
        return 1 if self.started is None else self.started.min_valid_members

    @property
    def _is_filtering(self) -> bool:
        started = self.started
        return started is not None and bool(started.scheduler.get("filter_zero_variance"))

    def cells(self, *roles: Role) -> list[int]:
        """Cells in one of `roles`, ascending."""
        return sorted(
            one.cell for one in self.engines.values() if one.cell is not None and one.role in roles
        )

    def lane(self, engine: str) -> list[Stretch]:
        """Where the seconds of `engine` went: measured stretches over what its role suggests."""
        waiting = frozenset({Activity.WAITING_FOR_DATA})
        base = overlay(self.engines[engine].lane, self.micro_steps.get(engine, []), over=waiting)
        return overlay(base, self.measured.get(engine, []))

    def device_seconds(self) -> dict[str, float]:
        return totals(self.lane(engine) for engine in self.engines)
