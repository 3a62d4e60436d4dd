"""The messages between the controller, the gateway and the cells. One closed set, typed.

The controller's connection carries commands and records; tokens travel on the engine link.
Invariant: each message names what it is about, so a late one can be recognised and refused.
"""

import msgspec

from opengyre.seams.cells import MicroStep, Rendezvous, StageTimes, StepCounts, UpdateNorms
from opengyre.seams.kv import HandoffStage
from opengyre.seams.memory import MemoryReport
from opengyre.seams.records import SegmentRef, TurnRecord
from opengyre.seams.weights import Snapshot


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag is the class name."""


class Done(Message, frozen=True, kw_only=True):
    """It was done; there is nothing more to say."""


# ---- every child process to the controller


class Hello(Message, frozen=True, kw_only=True):
    """First message of a process: who it is. The reply is its setup."""

    name: str
    incarnation: int
    pid: int


class CannotStart(Message, frozen=True, kw_only=True):
    """The user's input does not let this process start; it ends now."""

    name: str
    incarnation: int
    reason: str


class CellSetup(Message, frozen=True, kw_only=True):
    """`config_json` is the resolved run config; `cell` is None for a standalone engine."""

    engine: str
    cell: int | None
    incarnation: int
    slots: int
    config_json: str
    link_address: str
    plane_dir: str

    @property
    def life(self) -> str:
        """This life of the engine, as it is named everywhere."""
        return f"{self.engine}#{self.incarnation}"


class CellReady(Message, frozen=True, kw_only=True):
    """`store_address` is "host:port" of the store that this cell hosts for groups that it leads;
    "" when it takes no part in groups, and gradients then travel as a star."""

    engine: str
    incarnation: int
    link_address: str
    version: int
    checksum: int
    store_address: str = ""


# ---- controller to cell


class FreezeAll(Message, frozen=True, kw_only=True):
    """Shut the engine's own door and freeze what runs; done = writing stopped. `keeps_kv`: what is
    cached is pinned, so that another engine may read it."""

    keeps_kv: bool = False


class Frozen(Message, frozen=True, kw_only=True):
    """Writing has stopped for the `num_requests` that ran or waited."""

    num_requests: int


class AdmitRequests(Message, frozen=True, kw_only=True):
    """Open the engine's own door."""


class BeTrainer(Message, frozen=True, kw_only=True):
    """Free KV, take training buffers."""


class BeEngine(Message, frozen=True, kw_only=True):
    """Free training buffers, load `snapshot` as `version`, empty caches; the door stays shut."""

    version: int
    snapshot: Snapshot


class LoadVersion(Message, frozen=True, kw_only=True):
    """A publication at an engine whose requests are frozen."""

    version: int
    snapshot: Snapshot


class Loaded(Message, frozen=True, kw_only=True):
    """`memory` where the load ended a change of role."""

    version: int
    checksum: int
    memory: MemoryReport | None = None


class RoleTaken(Message, frozen=True, kw_only=True):
    memory: MemoryReport


class ExposeWeights(Message, frozen=True, kw_only=True):
    """What was exposed before stays if it is one of the `pinned` versions."""

    version: int
    pinned: list[int] = []


class Exposed(Message, frozen=True, kw_only=True):
    snapshot: Snapshot


class JoinStep(Message, frozen=True, kw_only=True):
    """Zero the sums, pull `snapshot` (None on the core), and claim until the stream is closed."""

    step: int
    version: int
    snapshot: Snapshot | None


class Joined(Message, frozen=True, kw_only=True):
    step: int
    version: int
    pull_s: float


class Settle(Message, frozen=True, kw_only=True):
    """The stream of `step` is drained: finish what is in flight and stand still. The members that
    answer are those of the reduction."""

    step: int


class Settled(Message, frozen=True, kw_only=True):
    """What this member's sums hold, and the times of each of its pipeline stages so far."""

    step: int
    counts: StepCounts
    stages: list[StageTimes]


class ReduceTogether(Message, frozen=True, kw_only=True):
    """To all members at once; the answer is Reduced. `epoch` rises with every try and every member
    that is dropped."""

    step: int
    epoch: int
    rendezvous: Rendezvous
    others: list[StepCounts]


class ShareGradients(Message, frozen=True, kw_only=True):
    step: int


class Gradients(Message, frozen=True, kw_only=True):
    snapshot: Snapshot
    counts: StepCounts


class ReduceStep(Message, frozen=True, kw_only=True):
    step: int
    members: list[Gradients]


class Reduced(Message, frozen=True, kw_only=True):
    counts: StepCounts


class UpdateStep(Message, frozen=True, kw_only=True):
    step: int
    version: int


class Updated(Message, frozen=True, kw_only=True):
    norms: UpdateNorms


class DropStep(Message, frozen=True, kw_only=True):
    """Stop claiming for `step` and forget its sums."""

    step: int


class SaveState(Message, frozen=True, kw_only=True):
    folder: str


class RestoreState(Message, frozen=True, kw_only=True):
    """A core that was started again: weights and optimizer of the last durable checkpoint."""

    folder: str


# ---- cell to controller


class Claim(Message, frozen=True, kw_only=True):
    step: int
    cell: int
    incarnation: int


class Claimed(Message, frozen=True, kw_only=True):
    """No micro-step and not closed: nothing to do yet, ask again."""

    micro_step: MicroStep | None = None
    is_closed: bool = False


class Finished(Message, frozen=True, kw_only=True):
    """The backward of a micro-step is done; its gradient is in the cell's sums."""

    step: int
    number: int
    cell: int
    incarnation: int
    num_tokens: int
    run_s: float


# ---- controller to gateway


class GatewayReady(Message, frozen=True, kw_only=True):
    host: str
    port: int


class ConnectEngine(Message, frozen=True, kw_only=True):
    engine: str
    incarnation: int
    link_address: str


class EngineGone(Message, frozen=True, kw_only=True):
    engine: str


class OpenSession(Message, frozen=True, kw_only=True):
    """`first_turn`: how many turns earlier launches of this execution took. `turns`: where those of
    this launch lie that an earlier life of the gateway told, in order."""

    execution: str
    key: str
    engine: str
    seed: int
    first_turn: int = 0
    turns: list[SegmentRef] = []


class GatewaySetup(Message, frozen=True, kw_only=True):
    """`listen_fd` is a bound socket that outlives the process. `sessions` go on from their records;
    `told` is the last one that was told, and what lies behind it is told before this gateway is
    ready (None: nothing was told yet)."""

    config_json: str
    tokens_dir: str
    listen_fd: int
    sessions: list[OpenSession] = []
    told: SegmentRef | None = None


class CloseSession(Message, frozen=True, kw_only=True):
    """Cancels what still runs for it and revokes its key."""

    execution: str


class SessionClosed(Message, frozen=True, kw_only=True):
    """Every turn of it was recorded and told before this."""

    num_turns: int


class ShutDoor(Message, frozen=True, kw_only=True):
    engine: str


class OpenDoorAt(Message, frozen=True, kw_only=True):
    engine: str


class SetRoutes(Message, frozen=True, kw_only=True):
    """(execution, engine) pairs."""

    routes: list[tuple[str, str]]


# ---- gateway to controller


class TurnTold(Message, frozen=True, kw_only=True):
    """A turn whose bytes are synced."""

    turn: TurnRecord


class HoldTold(Message, frozen=True, kw_only=True):
    """A request of `execution` is held by us from now on, or no longer."""

    execution: str
    is_held: bool


class ContinuedTold(Message, frozen=True, kw_only=True):
    execution: str
    turn: str
    attempt: int
    from_engine: str
    to_engine: str
    reason: str
    num_tokens_so_far: int


class HandoffTold(Message, frozen=True, kw_only=True):
    """What became of a prefix that one engine keeps and another may read: see `Handoff`."""

    ref: str
    stage: HandoffStage
    execution: str
    turn: str
    attempt: int
    from_engine: str
    to_engine: str
    num_tokens: int
    num_bytes: int
    read_s: float
    version: int
    reason: str


class LinkLost(Message, frozen=True, kw_only=True):
    """The connection to a living engine broke and cannot be made again."""

    engine: str
    incarnation: int


class Quit(Message, frozen=True, kw_only=True):
    """Finish and exit with 0."""


ALL: tuple[type[Message], ...] = tuple(Message.__subclasses__())
