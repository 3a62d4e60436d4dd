"""`[costs.*]` of a scenario file: one model for each cost model of the simulator, field by field.

Owns: keys, defaults, bounds. Must not know: the formulas (`simulate/costs.py`). Invariant: names
and defaults are those of the simulator's dataclasses (a test compares them).
"""

from typing import Annotated

from pydantic import Field

from opengyre.config.base import Section

Seconds = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]


class TrainingCostsConfig(Section):
    """The step stream: all members work on it at the sum of their rates."""

    group_device_s: float = Field(
        ge=1e-6, le=1e12, description="device-seconds of forward and backward for a mean group"
    )
    efficiency: float = Field(
        default=0.95, ge=1e-6, le=1, description="share of its devices that a satellite adds"
    )
    bubble_s: Seconds = Field(
        default=0.0, description="pipeline fill and drain each time work begins after a pause"
    )
    open_s: Seconds = Field(default=0.0, description="to open a step")
    reduce_s: Seconds = Field(default=0.0, description="to sum gradients over several members")
    optimizer_s: Seconds = Field(default=10.0, description="one optimizer update")
    is_by_length: bool = Field(
        default=False, description="a group's work grows with the length of its executions"
    )


class EngineCostsConfig(Section):
    """A rollout engine."""

    load_slope: float = Field(
        default=0.0, ge=0, le=100, description="b: speed at load x is (1 + b) / (1 + b x)"
    )
    prefill_tokens_per_s: float = Field(
        default=20_000.0, ge=1e-3, le=1e12, description="context tokens a device recomputes"
    )
    kv_move_tokens_per_s: float = Field(
        default=1_000_000.0, ge=1e-3, le=1e12, description="context tokens a device reads in a move"
    )
    has_kv_handoff: bool = Field(
        default=True, description="a leaving cell hands its KV over; else it is recomputed"
    )
    freeze_s: Seconds = Field(default=0.0, description="until a leaving engine has stopped writing")
    restart_s: Seconds = Field(default=120.0, description="until a fenced engine is up again")


class SwitchCostsConfig(Section):
    """A cell changes role."""

    enter_training_s: Seconds = Field(default=8.52, description="rollout to training")
    leave_training_s: Seconds = Field(default=3.46, description="training to rollout")
    join_s: Seconds = Field(default=0.0, description="a satellite pulls a step's snapshot")
    load_s: Seconds = Field(default=0.0, description="a returning satellite loads new weights")


class PublicationCostsConfig(Section):
    """New weights reach the rollout engines."""

    expose_s: Seconds = Field(default=0.0, description="the core exposes new weights")
    load_s: Seconds = Field(default=10.0, description="an engine is closed while it loads them")


class CheckpointCostsConfig(Section):
    """The end of a burst is made durable."""

    save_s: Seconds = Field(default=0.0, description="until the checkpoint is durable")


class GraderCostsConfig(Section):
    """Grading after an execution closed."""

    grade_s: Seconds = Field(default=0.0, description="one grading")
    num_graders: int | None = Field(
        default=None, ge=1, le=1_000_000, description="gradings at a time; left out: no limit"
    )
    fail_rate: Share = Field(default=0.0, description="share of gradings without a verdict")


class ToolCostsConfig(Section):
    """The turns of an execution, drawn when a move or a publication asks."""

    share: Share = Field(default=0.3, description="share of an execution's time in tool calls")
    call_s: Seconds = Field(default=20.0, description="mean of one tool call (exponential)")
    start_tokens: int = Field(
        default=4_000, ge=0, le=10**9, description="context tokens of a new execution"
    )
    tokens_per_s: float = Field(
        default=20.0, ge=0, le=1e9, description="context tokens an execution gains in a second"
    )
    max_tokens: int = Field(
        default=200_000, ge=0, le=10**9, description="context tokens an execution carries at most"
    )
