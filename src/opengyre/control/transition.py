"""A cell leaving rollout: the stages of it, in the order of the safety argument.

Owns: LeavingStage, its transition table, the Transition record. Must not know: where moved
executions go, or what a stage commands.
Invariant: a stage begins only when the one before was applied.
"""

from dataclasses import dataclass
from enum import Enum

from opengyre.control.errors import InvariantError
from opengyre.control.ids import CommandId, EngineId, ExecutionId


class LeavingStage(Enum):
    CLOSING_DOOR = "closing the door"
    REROUTING = "rerouting"
    FREEZING = "freezing"
    ENTERING = "entering training"


LEAVING_TRANSITIONS: dict[LeavingStage, frozenset[LeavingStage]] = {
    LeavingStage.CLOSING_DOOR: frozenset({LeavingStage.REROUTING, LeavingStage.FREEZING}),
    LeavingStage.REROUTING: frozenset({LeavingStage.FREEZING}),
    LeavingStage.FREEZING: frozenset({LeavingStage.ENTERING}),
    LeavingStage.ENTERING: frozenset(),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Transition:
    """`command` is the one under way until `is_answered`; `failure` is why it failed, if it did.
    An abandoned transition turns back once that command is answered."""

    cell: int
    stage: LeavingStage
    command: CommandId
    moves: tuple[tuple[ExecutionId, EngineId], ...] = ()
    is_answered: bool = False
    failure: str | None = None
    is_unknown: bool = False
    is_abandoned: bool = False

    @property
    def is_before_freeze(self) -> bool:
        return self.stage in (LeavingStage.CLOSING_DOOR, LeavingStage.REROUTING)

    def move(self, stage: LeavingStage, command: CommandId) -> None:
        if stage not in LEAVING_TRANSITIONS[self.stage]:
            raise InvariantError(f"cell {self.cell}: {self.stage.value} -> {stage.value}")
        self.stage, self.command = stage, command
