"""What the scheduler asks of the shell. Frozen data with an id and a reason in words.

The shell applies a command and answers with `CommandApplied`, `CommandFailed` or
`CommandUnknown`; some are answered by a richer fact as well (named below). Commands of one plan
are started in order; the shell never reorders commands that name the same engine.
"""

from dataclasses import dataclass

from opengyre.control.ids import CommandId, EngineId, ExecutionId, GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    command_id: CommandId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchGroups(Command):
    """New groups of a boundary. `groups` = ((group, executions), ...) in dispatch order."""

    groups: tuple[tuple[GroupId, tuple[ExecutionId, ...]], ...]
    version: int
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchEval(Command):
    """Eval executions of a boundary: one per held-out task, in task order; they form no group."""

    executions: tuple[ExecutionId, ...]
    version: int
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Command):
    """Start the harness of `execution`; its slot on `engine` is taken from now on."""

    execution: ExecutionId
    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Command):
    """End a launched execution; it closes as cancelled (answered by ExecutionClosed too).

    An execution cancelled in the queue is launched and finished in one fact by the scheduler
    itself; the shell records it and starts nothing (`was_queued`).
    """

    execution: ExecutionId
    was_queued: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseDoor(Command):
    """Nothing new is placed or admitted at `engine`; arriving requests are held and counted."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reroute(Command):
    """New turns of each execution go to its destination from now on: ((execution, engine), ...).

    Also used to place displaced executions of a lost engine.
    """

    moves: tuple[tuple[ExecutionId, EngineId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Command):
    """Freeze and cancel every running request at `engine`; applied = writing stopped there."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDoor(Command):
    """Admit requests at `engine` again (its verified version is its due version)."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence(Command):
    """The process of `engine` (of a cell: the whole cell) is suspect: kill it and start it anew.

    The scheduler counts it as lost from now on; its EngineLost changes nothing more.
    """

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterTraining(Command):
    """Cell frees KV and rollout buffers and restores training buffers."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveTraining(Command):
    """Cell frees training buffers, loads, verifies, empties caches; its door stays shut."""

    cell: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Command):
    """Whole publication at one rollout engine: door, freeze, pause, load, verify, empty, open."""

    engine: EngineId
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStep(Command):
    """The core exposes its weights under `version` and the stream of `step` opens."""

    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(Command):
    """Cell pulls the snapshot of `step` and joins (answered by MemberAdmitted)."""

    step: int
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Command):
    """The unassigned groups the stream may pack now, in this order; replaces the last offer."""

    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStep(Command):
    """No more groups: finish micro-steps, reduce, update (answered by StepCommitted).

    The stream closes at once, in the order of the plans: a DropMember after it takes no group
    out of the step.
    """

    step: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropMember(Command):
    """A cell left the open step (death, recall, deadline): its work returns to the stream.

    Groups that came back whole are told (GroupReturned) before this is answered.
    """

    step: int
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonStep(Command):
    """The core left or died: `step` is dropped, weights unchanged, to be redone.

    The next OpenStep, which may have the same number, comes only after its answer.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Command):
    """Write the state after `step` durably; applied = it survives kill -9."""

    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expose(Command):
    """The core exposes the published weights of `version` for engines to load."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun(Command):
    """Everything is told to end, in one order. `failed` selects exit code 1."""

    failed: bool


AnyCommand = (
    DispatchGroups
    | DispatchEval
    | Launch
    | Cancel
    | CloseDoor
    | Reroute
    | Freeze
    | OpenDoor
    | Fence
    | EnterTraining
    | LeaveTraining
    | Publish
    | OpenStep
    | Admit
    | Offer
    | CloseStep
    | DropMember
    | AbandonStep
    | Checkpoint
    | Expose
    | EndRun
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Commands in order, and what the run waits for (key, words), in a stable order."""

    commands: tuple[AnyCommand, ...] = ()
    waiting_for: tuple[str, ...] = ()
