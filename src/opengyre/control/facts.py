"""What the shell tells the scheduler. Frozen values; the journal stores them in order.

Every fact is true when it is observed and is never taken back. A fact that names a command
answers it: applied, failed or unknown (unknown: the effect may have happened; the holder is
fenced before its slot is used again).
"""

from dataclasses import dataclass
from enum import StrEnum

from opengyre.control.ids import CommandId, EngineId, ExecutionId, GroupId


class Outcome(StrEnum):
    """How an execution closed."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """An engine process is up and has verified `version`; its door may be opened.

    A cell that restarts after a death becomes a member again at the next boundary.
    """

    engine: EngineId
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """The process of this engine (for a cell: of the whole cell) is gone or fenced."""

    engine: EngineId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandApplied:
    command_id: CommandId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailed:
    command_id: CommandId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandUnknown:
    command_id: CommandId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionClosed:
    """The one outcome of an execution; a second one is refused and counted."""

    execution: ExecutionId
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictGiven:
    """The grader's last word. `reward` is None when there is no verdict (never 0 for that).

    `num_trainable_tokens` counts tokens of the execution that may enter a step. `shaped` is what
    the advantage is taken of; None: the reward itself. `exclusion` says why the member takes no
    part in its group though it has a verdict ("": it takes part).
    """

    execution: ExecutionId
    reward: float | None
    reason: str
    num_trainable_tokens: int
    shaped: float | None = None
    exclusion: str = ""

    @property
    def value(self) -> float | None:
        """What its group compares; None: the member is not valid."""
        if self.reward is None or self.exclusion:
            return None
        return self.reward if self.shaped is None else self.shaped


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssigned:
    """The first micro-step of this group was claimed in `step`."""

    group: GroupId
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReturned:
    """All micro-steps of an assigned group came back to the stream (death, recall)."""

    group: GroupId
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAdmitted:
    """Cell `cell` verified the step's snapshot and claims micro-steps of `step`."""

    step: int
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """The step's one update is done; `version` is unchanged if nothing was trainable."""

    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A person or a signal asks the run to end early; it ends by the order of rule 12."""

    reason: str


Fact = (
    EngineReady
    | EngineLost
    | CommandApplied
    | CommandFailed
    | CommandUnknown
    | ExecutionClosed
    | VerdictGiven
    | GroupAssigned
    | GroupReturned
    | MemberAdmitted
    | StepCommitted
    | StopRequested
)
