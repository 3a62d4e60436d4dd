"""The numbers the scheduler runs by: frozen, checked, resolved.

Owns: SchedulerConfig, EngineSpec and their bounds. Must not know: TOML, config models, files.
Invariants: cells are 0..K-1 with one engine each; a config that is out of bounds is our fault
here (the config layer has refused it in the user's words before).
"""

from dataclasses import dataclass
from enum import StrEnum

from opengyre.control.errors import InvariantError
from opengyre.control.ids import EngineId
from opengyre.control.quota import least_staleness, most_outstanding


class PolicyName(StrEnum):
    """How cells change roles (rule 13)."""

    ELASTIC = "elastic"
    COLOCATE = "colocate"
    ASYNC = "async"


class Overdue(StrEnum):
    """What a step does when a newer ready group would push an older live one past the bound."""

    WAIT = "wait"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One rollout engine: its slots, and the cell it lives in (None: standalone)."""

    engine: EngineId
    slots: int
    cell: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Letters of the rules: N group_size, B groups_per_step, mu steps_per_burst, phi run_ahead.
    `num_training_cells` (async only) cells train always, the others never; without `is_streaming`
    a step waits until all its groups are ready. `oversample` times the groups that steps take are
    dispatched; with `filter_zero_variance` a group whose valid members' values do not differ is
    filtered. `max_staleness` None means one more than the least that some order keeps: phi + mu
    without oversampling. `max_void_in_a_row` None means 3 B. With `is_strict` a reservation that
    does not fit raises InvariantError instead of abandoning the transition.
    """

    num_cells: int
    engines: tuple[EngineSpec, ...]
    num_steps: int
    policy: PolicyName = PolicyName.ELASTIC
    is_streaming: bool = True
    num_training_cells: int = 0
    group_size: int = 8
    groups_per_step: int = 16
    steps_per_burst: int = 2
    run_ahead: int = 1
    oversample: float = 1.0
    filter_zero_variance: bool = False
    supply_fraction: float = 1 / 8
    supply_hold_s: float = 1.0
    min_valid_members: int = 2
    max_void_in_a_row: int | None = None
    max_staleness: int | None = None
    overdue: Overdue = Overdue.WAIT
    recall_after_s: float = 60.0
    join_deadline_s: float = 30.0
    publish_timeout_s: float = 120.0
    eval_every_bursts: int = 0
    num_eval_executions: int = 0
    eval_at_start: bool = False
    eval_at_end: bool = False
    eval_deadline_s: float = 600.0
    cancel_deadline_s: float = 60.0
    lost_deadline_s: float = 600.0
    max_core_losses: int = 3
    initial_version: int = 0
    is_strict: bool = False

    def __post_init__(self) -> None:
        cells = sorted(spec.cell for spec in self.engines if spec.cell is not None)
        _require(self.num_cells >= 1, "there is at least one cell, the core")
        _require(cells == list(range(self.num_cells)), "each cell 0..K-1 has exactly one engine")
        names = {spec.engine for spec in self.engines}
        _require(len(names) == len(self.engines), "engine names are unique")
        _require(all(spec.slots >= 1 for spec in self.engines), "every engine has a slot")
        self._check_split()
        _require(self.num_steps >= 1, "num_steps >= 1")
        _require(self.group_size >= 1, "group_size >= 1")
        _require(self.groups_per_step >= 1, "groups_per_step >= 1")
        _require(self.steps_per_burst >= 1, "steps_per_burst >= 1")
        _require(self.run_ahead >= 0, "run_ahead >= 0")
        _require(self.oversample >= 1, "oversample >= 1")
        _require(0 < self.supply_fraction <= 0.5, "0 < supply_fraction <= 1/2")
        _require(self.min_valid_members >= 1, "min_valid_members >= 1")
        _require(
            self.staleness_bound >= self.least_staleness,
            "max_staleness >= ceil(oversample * (run_ahead + steps_per_burst)) - 1",
        )

    def _check_split(self) -> None:
        if self.policy is not PolicyName.ASYNC:
            _require(self.num_training_cells == 0, "num_training_cells belongs to async")
            return
        _require(1 <= self.num_training_cells <= self.num_cells, "async: 1..K cells train")
        num_rollout = len(self.engines) - self.num_training_cells
        _require(num_rollout >= 1, "async: at least one engine stays in rollout")

    @property
    def staleness_bound(self) -> int:
        return self.least_staleness + 1 if self.max_staleness is None else self.max_staleness

    @property
    def least_staleness(self) -> int:
        """Of a strict order, oldest first."""
        return least_staleness(
            num_steps=self.run_ahead + self.steps_per_burst,
            groups_per_step=self.groups_per_step,
            oversample=self.oversample,
        )

    def most_outstanding(self, steps_left: int) -> int:
        """Rule 3: the run-ahead bound, or what the remaining steps can consume."""
        return most_outstanding(
            num_steps=min(self.run_ahead + self.steps_per_burst, steps_left),
            groups_per_step=self.groups_per_step,
            oversample=self.oversample,
        )

    @property
    def void_bound(self) -> int:
        if self.max_void_in_a_row is None:
            return 3 * self.groups_per_step
        return self.max_void_in_a_row

    @property
    def min_supply_groups(self) -> float:
        return self.supply_fraction * self.groups_per_step


def _require(is_true: bool, words: str) -> None:
    if not is_true:
        raise InvariantError(f"scheduler config: {words}")
