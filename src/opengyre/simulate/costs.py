"""What things cost in simulated time.

Owns: the cost models and their formulas. Must not know: events, the scheduler, where a number was
measured. Invariants: every field has a unit and a bound; each changes a result (a test per field).
"""

from dataclasses import dataclass, field

from opengyre.control.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """A rollout engine.

    load_slope: b of the load curve; an execution's speed at used/slots = x is (1+b) / (1+b x),
        so 1 on a full engine, where the workload's durations are measured; 0 is constant.
    prefill_tokens_per_s: context recomputed per device of the engine; its devices work together,
        on one request after another.
    kv_move_tokens_per_s: context read from a leaving cell per device of the engine, likewise.
    has_kv_handoff: False recomputes the context of every request that moves.
    freeze_s: seconds until a leaving engine's requests have stopped at a token boundary.
    restart_s: seconds until an engine that was fenced is up again.
    """

    load_slope: float = 0.0
    prefill_tokens_per_s: float = 20_000.0
    kv_move_tokens_per_s: float = 1_000_000.0
    has_kv_handoff: bool = True
    freeze_s: float = 0.0
    restart_s: float = 120.0

    def __post_init__(self) -> None:
        _at_least_zero(self, "load_slope", "freeze_s", "restart_s")
        _above_zero(self, "prefill_tokens_per_s", "kv_move_tokens_per_s")

    def speed(self, load: float) -> float:
        """Speed of each request at `load` = used / slots."""
        return (1.0 + self.load_slope) / (1.0 + self.load_slope * load)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    """The step stream, a fluid: all members work on the group at its head.

    group_device_s: device-seconds of forward and backward for one group of mean length.
    efficiency: share of its devices that a satellite adds (1 is a linear speed-up over cells).
    bubble_s: seconds lost to filling and draining the pipeline each time work begins after a
        pause.
    open_s, reduce_s, optimizer_s: seconds to open a step, to reduce over its members (with one
        member nothing is reduced), and to make the update.
    is_by_length: a group's work is proportional to the mean length of its valid executions.
    """

    group_device_s: float
    efficiency: float = 0.95
    bubble_s: float = 0.0
    open_s: float = 0.0
    reduce_s: float = 0.0
    optimizer_s: float = 10.0
    is_by_length: bool = False

    def __post_init__(self) -> None:
        _above_zero(self, "group_device_s", "efficiency")
        _at_least_zero(self, "bubble_s", "open_s", "reduce_s", "optimizer_s")

    def groups_per_s(self, num_devices: int, *, is_core: bool) -> float:
        """Rate of one cell as a member of a step."""
        share = 1.0 if is_core else self.efficiency
        return num_devices * share / self.group_device_s


def group_device_s(*, update_s: float, num_devices: int, num_groups: int) -> float:
    """From the seconds of one update of `num_groups` groups on one cell of `num_devices`."""
    return update_s * num_devices / num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCosts:
    """A cell changes role, all in seconds.

    enter_training_s: rollout memory out, training memory in. leave_training_s: the reverse.
    join_s: a satellite pulls and verifies a step's snapshot.
    load_s: a returning satellite loads and verifies the published weights.
    """

    enter_training_s: float = 8.52
    leave_training_s: float = 3.46
    join_s: float = 0.0
    load_s: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero(self, "enter_training_s", "leave_training_s", "join_s", "load_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationCosts:
    """expose_s: the core exposes new weights. load_s: one engine shuts its door, loads, verifies
    and opens; all engines at once."""

    expose_s: float = 0.0
    load_s: float = 10.0

    def __post_init__(self) -> None:
        _at_least_zero(self, "expose_s", "load_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCosts:
    """save_s: seconds until the state at a burst's end is durable."""

    save_s: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero(self, "save_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderCosts:
    """grade_s: seconds of one grading. num_graders: gradings at one time, the others wait; None
    is no limit. fail_rate: share of gradings that end without a verdict."""

    grade_s: float = 0.0
    num_graders: int | None = None
    fail_rate: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero(self, "grade_s")
        _share(self, "fail_rate")
        if self.num_graders is not None and self.num_graders < 1:
            raise InvariantError("GraderCosts: num_graders >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCosts:
    """Turns of an execution, drawn only when somebody asks.

    share: share of an execution's time in tool calls; that part feels no load and no closed door.
    call_s: mean seconds of one tool call (exponential).
    start_tokens, tokens_per_s, max_tokens: an execution that has worked for t seconds carries
        min(max_tokens, start_tokens + 2 u t tokens_per_s) tokens, u uniform in (0, 1).
    """

    share: float = 0.3
    call_s: float = 20.0
    start_tokens: int = 4_000
    tokens_per_s: float = 20.0
    max_tokens: int = 200_000

    def __post_init__(self) -> None:
        _share(self, "share")
        _at_least_zero(self, "call_s", "start_tokens", "tokens_per_s", "max_tokens")

    def tokens(self, worked_s: float, draw: float) -> float:
        """Context tokens after `worked_s` seconds of work; `draw` is uniform in (0, 1)."""
        grown = self.start_tokens + 2.0 * draw * worked_s * self.tokens_per_s
        return min(float(self.max_tokens), grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    training: TrainingCosts
    engine: EngineCosts = field(default_factory=EngineCosts)
    switch: SwitchCosts = field(default_factory=SwitchCosts)
    publication: PublicationCosts = field(default_factory=PublicationCosts)
    checkpoint: CheckpointCosts = field(default_factory=CheckpointCosts)
    grader: GraderCosts = field(default_factory=GraderCosts)
    tools: ToolCosts = field(default_factory=ToolCosts)


def _above_zero(costs: object, *names: str) -> None:
    for name in names:
        if not getattr(costs, name) > 0:
            raise InvariantError(f"{type(costs).__name__}: {name} > 0")


def _at_least_zero(costs: object, *names: str) -> None:
    for name in names:
        if not getattr(costs, name) >= 0:
            raise InvariantError(f"{type(costs).__name__}: {name} >= 0")


def _share(costs: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(costs, name) <= 1:
            raise InvariantError(f"{type(costs).__name__}: 0 <= {name} <= 1")
