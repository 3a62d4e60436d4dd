"""Roles of cells and states of engines: two lifecycles, two tables.

Owns: CellRole, EngineState, their transition tables and records. Must not know: commands, time
limits, why anything changes.
Invariants: an unlisted transition raises; a cell's engine serves only in role rollout.
"""

from dataclasses import dataclass, field
from enum import Enum

from opengyre.control.errors import InvariantError
from opengyre.control.ids import EngineId, ExecutionId


class CellRole(Enum):
    ABSENT = "absent"
    ROLLOUT = "rollout"
    LEAVING = "leaving"
    TRAINING = "training"
    RETURNING = "returning"


CELL_TRANSITIONS: dict[CellRole, frozenset[CellRole]] = {
    CellRole.ABSENT: frozenset({CellRole.ROLLOUT}),
    CellRole.ROLLOUT: frozenset({CellRole.LEAVING, CellRole.ABSENT}),
    CellRole.LEAVING: frozenset({CellRole.TRAINING, CellRole.ROLLOUT, CellRole.ABSENT}),
    CellRole.TRAINING: frozenset({CellRole.RETURNING, CellRole.ABSENT}),
    CellRole.RETURNING: frozenset({CellRole.ROLLOUT, CellRole.ABSENT}),
}


class EngineState(Enum):
    """SHUT: alive, door closed. OPENING: told to open. PUBLISHING: a version is due there."""

    ABSENT = "absent"
    SHUT = "shut"
    OPENING = "opening"
    OPEN = "open"
    PUBLISHING = "publishing"
    QUARANTINED = "quarantined"


ENGINE_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.ABSENT: frozenset({EngineState.SHUT}),
    EngineState.SHUT: frozenset(
        {EngineState.OPENING, EngineState.PUBLISHING, EngineState.SHUT, EngineState.ABSENT}
    ),
    EngineState.OPENING: frozenset(
        {EngineState.OPEN, EngineState.SHUT, EngineState.PUBLISHING, EngineState.ABSENT}
    ),
    EngineState.OPEN: frozenset({EngineState.SHUT, EngineState.PUBLISHING, EngineState.ABSENT}),
    EngineState.PUBLISHING: frozenset(
        {
            EngineState.OPEN,
            EngineState.PUBLISHING,
            EngineState.QUARANTINED,
            EngineState.ABSENT,
        }
    ),
    EngineState.QUARANTINED: frozenset(
        {EngineState.OPEN, EngineState.PUBLISHING, EngineState.ABSENT}
    ),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """One rollout engine, the `number`-th of the config. `stay` orders engines by how long they
    stay in rollout (0 longest); `is_serving`: its slots count in C_R; `lost_incarnation`: the
    last one whose loss was told. Changed by the topology."""

    engine: EngineId
    slots: int
    cell: int | None
    number: int
    stay: int
    state: EngineState = EngineState.ABSENT
    incarnation: int = 0
    lost_incarnation: int = 0
    has_reported: bool = False
    verified_version: int | None = None
    due_version: int | None = None
    due_since_s: float = 0.0
    is_serving: bool = False
    suspicion: str | None = None
    live: dict[ExecutionId, None] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        return self.slots - len(self.live)

    def move(self, state: EngineState) -> None:
        if state not in ENGINE_TRANSITIONS[self.state]:
            raise InvariantError(f"{self.engine}: {self.state.value} -> {state.value}")
        self.state = state


@dataclass(slots=True, kw_only=True, eq=False)
class Cell:
    """One cell. `in_order` is False from its death to the next boundary; `must_return` asks it
    back to rollout as soon as it is in training. A bound cell serves no rollout: a `is_fixed` one
    always trains, a `is_wanted` one was in training when it died. Changed by the topology."""

    cell: int
    engine: EngineId
    role: CellRole = CellRole.ABSENT
    is_fixed: bool = False
    in_order: bool = True
    must_return: bool = False
    is_wanted: bool = False

    @property
    def name(self) -> str:
        return "core" if self.cell == 0 else f"cell {self.cell}"

    @property
    def is_bound(self) -> bool:
        return self.is_fixed or self.is_wanted

    def move(self, role: CellRole) -> None:
        if role not in CELL_TRANSITIONS[self.role]:
            raise InvariantError(f"cell {self.cell}: {self.role.value} -> {role.value}")
        self.role = role
