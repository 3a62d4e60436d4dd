"""The lives that the naive model keeps: executions, groups, engines, steps, commits, samples.

Owns: what is known of each. Must not know: how an event changes it, any rule.
"""

from dataclasses import dataclass

from opengyre.control import facts as f
from opengyre.control.cells import CellRole
from opengyre.control.config import EngineSpec
from opengyre.control.ids import EngineId, ExecutionId, GroupId

ROUNDING_S = 1e-9


@dataclass(slots=True, kw_only=True)
class ExecutionLife:
    """`is_valid` None: no last word of the grader yet; `value` is what a valid one says. `place`
    None: queued, displaced or over."""

    execution: ExecutionId
    group: GroupId | None
    is_launched: bool = False
    place: EngineId | None = None
    outcome: f.Outcome | None = None
    is_valid: bool | None = None
    value: float | None = None
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
