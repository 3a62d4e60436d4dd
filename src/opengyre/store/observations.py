"""What the shell saw and the scheduler does not decide by: typed rows of the journal.

Owns: the closed set of observations and of the rows that frame a run (meta). Must not know: who
reports them, or how they are shown. Invariants: an observation is written after what it tells of
is durable; a number that is not finite is told as None.
"""

from enum import StrEnum
from typing import Any

import msgspec

from opengyre.seams.cells import StageTimes
from opengyre.seams.kv import HandoffStage
from opengyre.seams.memory import MemoryReport
from opengyre.seams.records import TurnRecord

SCHEMA = 1


class Activity(StrEnum):
    """Where a device-second went; every one is in exactly one of these."""

    GENERATING = "generating"
    TRAINING = "training"
    WAITING_FOR_COVERAGE = "waiting_for_coverage"
    WAITING_FOR_SUPPLY = "waiting_for_supply"
    WAITING_FOR_DATA = "waiting_for_data"
    MOVING = "moving"
    PUBLISHING = "publishing"
    IDLE_AT_END = "idle_at_end"


class Role(StrEnum):
    """What an engine does, as the journal shows it."""

    STARTING = "starting"
    ROLLOUT = "rollout"
    LEAVING = "leaving"
    TRAINING = "training"
    RETURNING = "returning"
    LOST = "lost"


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what the shell tells beside the facts."""


class EngineSlots(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout engine of the run; `cell` is None for a standalone engine."""

    engine: str
    cell: int | None
    slots: int


class RunStarted(Observation, frozen=True, kw_only=True):
    """First row of a run. `scheduler` is the scheduler's config as plain JSON, for replay."""

    schema: int = SCHEMA
    version: str
    seed: int
    engines: list[EngineSlots]
    num_steps: int
    steps_per_burst: int
    groups_per_step: int
    executions_per_group: int
    min_valid_members: int
    supply_fraction: float
    scheduler: dict[str, Any]


class RunEnded(Observation, frozen=True, kw_only=True):
    """Last row of a run that ended in order. `wall_s` includes start-up; `is_interrupted` if a
    person or a signal asked for the end."""

    is_failed: bool
    is_interrupted: bool = False
    reason: str
    wall_s: float


class GroupTask(Observation, frozen=True, kw_only=True):
    group: str
    task: str


class LaunchRecorded(Observation, frozen=True, kw_only=True):
    """A harness was started; `launch_number` counts from 1, `group` is None for evaluation."""

    execution: str
    task: str
    group: str | None
    launch_number: int


class TurnRecorded(Observation, frozen=True, kw_only=True):
    """The bytes of this turn are synced."""

    turn: TurnRecord


class Continued(Observation, frozen=True, kw_only=True):
    """A live request was cut and goes on from prompt + tokens so far. `reason`: "frozen" for a
    move or a publication, else the engine's words."""

    execution: str
    turn: str
    attempt: int = 0
    from_engine: str
    to_engine: str
    reason: str
    num_tokens_so_far: int


class Handoff(Observation, frozen=True, kw_only=True):
    """A prefix that `from_engine` pinned under `ref` at `version`, as its gateway heard of it.

    `turn` is "" for the prefix of an execution inside a tool call. `num_tokens` are those of the
    reference; ACKNOWLEDGED: those that `to_engine` has of it now, `num_bytes` read in `read_s`,
    with a `reason` where nothing was read. RELEASED: `reason` is how the pin ended, or that it
    was for nothing.
    """

    ref: str
    stage: HandoffStage
    execution: str
    turn: str
    attempt: int = 0
    from_engine: str
    to_engine: str = ""
    version: int
    num_tokens: int
    num_bytes: int = 0
    read_s: float = 0.0
    reason: str = ""


class HarnessError(Observation, frozen=True, kw_only=True):
    """A harness got an error from us; `during_move` if a move or publication touched it then."""

    execution: str
    kind: str
    during_move: bool


class GatewayLost(Observation, frozen=True, kw_only=True):
    """A gateway process died while it served `executions`; what was durable of them was told
    before this row, and no record will tell of their calls that ran. `gone_s` is how long nobody
    served them, None if it was not started again. `retold` are (turn, attempt) told from their
    records alone: what else was told of them may have been lost."""

    gateway: str
    incarnation: int
    reason: str
    executions: list[str]
    gone_s: float | None
    retold: list[tuple[str, int]] = []


class PathDigest(msgspec.Struct, frozen=True, kw_only=True):
    """What one path inside a micro-step was, without its tokens.

    `turn` is its leaf; `ids_crc32` is over all ids of the path as int32 little endian (none if it
    was only counted); `trained` the ranges [start, end) of trained positions; `logprobs_crc32` is
    over the sampling logprobs at those positions as float32.
    """

    execution: str
    group: str
    turn: str
    num_tokens: int
    ids_crc32: int
    trained: list[tuple[int, int]]
    logprobs_crc32: int


class MicroStepDone(Observation, frozen=True, kw_only=True):
    """The gradient of a micro-step is in the sums of `cell`."""

    step: int
    number: int
    cell: int
    groups: list[str]
    num_tokens: int
    run_s: float
    paths: list[PathDigest] = []


class MicroStepReturned(Observation, frozen=True, kw_only=True):
    """A claimed or done micro-step went back to the stream; `cell` no longer counts for it."""

    step: int
    number: int
    cell: int


class MemberJoined(Observation, frozen=True, kw_only=True):
    """A cell pulled the snapshot; `is_mid_batch` if the step had claimed micro-steps by then."""

    step: int
    cell: int
    is_mid_batch: bool
    pull_s: float


class MemberAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one execution of a consumed group: its raw and shaped reward, its advantage
    (None: it took no part), and where every token that was sampled for it ended (P11). `masked`
    and `dropped` are numbers of tokens by reason."""

    execution: str
    reward: float | None
    shaped: float | None
    advantage: float | None
    sampled: int
    trained: int
    masked: dict[str, int] = {}
    dropped: dict[str, int] = {}


class CellWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one cell did of a step. `num_tokens` went through the model in what is done;
    `num_returned` micro-steps went back to the stream when the cell was dropped, and what it said
    after that was refused."""

    num_claimed: int
    num_done: int
    num_tokens: int
    num_returned: int = 0
    num_refused: int = 0


class StepReport(Observation, frozen=True, kw_only=True):
    """One accepted step. `groups` are those consumed, `micro_steps` the numbers summed into the
    update; `loss` is averaged as the config says, None where nothing was trainable or not finite;
    `num_clipped` of the tokens were bounded by the objective's interval or cap; `divergence` is
    the mean per token from the initial weights, 0 without training.kl_coefficient, None where not
    finite.

    `reason`: why there was no update. `mean_reward` is of raw rewards, `mean_shaped` of what
    advantages were taken of. `watched_share`: of the executions with the best reward of their
    group, how many made a call that touched what is watched (test files). `num_no_variance`:
    groups whose rewards did not differ, which teach nothing. `num_flat_tokens` went through the
    model, `num_repeated_tokens` would have, path by path; `fill` is the mean share of the budget
    that a micro-step used. `reduced_by`: alone, group or star, after `num_reduce_tries`, `reduce_s`
    seconds after the last micro-step of the stream. `stages`: by member, where the time of each of
    its pipeline stages went. `cells`: by name, dropped ones too, what each did.
    """

    step: int
    version_before: int
    version_after: int
    groups: list[str]
    micro_steps: list[int]
    num_executions: float
    num_tokens: int
    loss: float | None
    grad_norm: float | None
    is_applied: bool
    is_short: bool
    mean_reward: float | None
    opened_s: float
    closed_s: float
    mean_shaped: float | None = None
    watched_share: float | None = None
    reason: str = ""
    members: list[MemberAccount] = []
    num_no_variance: int = 0
    num_flat_tokens: int = 0
    num_repeated_tokens: int = 0
    fill: float | None = None
    num_clipped: int = 0
    divergence: float | None = None
    reduced_by: str = ""
    num_reduce_tries: int = 1
    reduce_s: float | None = None
    stages: dict[str, list[StageTimes]] = {}
    cells: dict[str, CellWork] = {}


class VersionPublished(Observation, frozen=True, kw_only=True):
    """`engine` verified `version`; its requests were held for `held_s`."""

    engine: str
    version: int
    checksum: int
    held_s: float
    num_continued: int


class RoleChange(Observation, frozen=True, kw_only=True):
    """A finished transition of a cell; `memory` None: it was not told."""

    cell: int
    role: Role
    started_s: float
    ended_s: float
    memory: MemoryReport | None = None


class ActivitySpan(Observation, frozen=True, kw_only=True):
    """A measured stretch of one device; it takes precedence over what roles suggest."""

    engine: str
    activity: Activity
    start_s: float
    end_s: float


class EvalResult(Observation, frozen=True, kw_only=True):
    """One evaluation. `rewards` in task order, None where there is no verdict;
    `later_token_share` is the share of tokens sampled under later versions."""

    burst: int
    version: int
    rewards: list[float | None]
    later_token_share: float = 0.0


class SchedulerCounts(Observation, frozen=True, kw_only=True):
    """The scheduler's own counters after a decide, told so that they can be checked."""

    num_dispatched: int
    num_launched: int
    num_finished: int
    capacity_slots: int


AnyObservation = (
    RunStarted
    | RunEnded
    | GroupTask
    | LaunchRecorded
    | TurnRecorded
    | Continued
    | Handoff
    | HarnessError
    | GatewayLost
    | MicroStepDone
    | MicroStepReturned
    | MemberJoined
    | StepReport
    | VersionPublished
    | RoleChange
    | ActivitySpan
    | EvalResult
    | SchedulerCounts
)
META = (RunStarted, RunEnded)
