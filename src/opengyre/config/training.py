"""Settings of the update: `[training]`. Letters and formulas follow the GSPO variant of the paper.

Owns: keys, defaults, bounds. Must not know: how gradients are summed or who computes them.
"""

from typing import Annotated, Literal

from pydantic import Field

from opengyre.config.base import Section

Role = Literal["main", "main-summary", "sub-agent", "sub-agent-summary", "side"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingConfig(Section):
    """Objective, advantage and optimizer."""

    old: Literal["rollout", "step"] = Field(
        default="rollout",
        description="logprobs the ratio is taken against: recorded, or of the same pass",
    )
    clip_low: float = Field(
        default=0.995, gt=0, le=1, description="lower end of the ratio interval"
    )
    clip_high: float = Field(
        default=1.005, ge=1, le=100, description="upper end of the ratio interval"
    )
    max_token_weight: float = Field(
        default=5.0, ge=1, le=1000, description='cap on a token\'s importance weight (old = "step")'
    )
    learning_rate: float = Field(
        default=1e-6, gt=0, le=1, description="AdamW step size after warm-up"
    )
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW decay rates")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="AdamW weight decay")
    warmup_updates: int = Field(
        default=0, ge=0, description="updates over which the step size rises"
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="norm the averaged gradient is clipped to"
    )
    micro_step_tokens: int = Field(default=8192, ge=1, description="most tokens in one micro-step")
    advantage: Literal["mean_std", "mean"] = Field(
        default="mean_std",
        description="(R - mean) / (std + eps) over a group's valid members, or R - mean",
    )
    advantage_eps: float = Field(default=1e-6, gt=0, le=1, description="eps of the advantage")
    untrained_roles: tuple[Role, ...] = Field(
        default=("side",),
        description="roles whose calls are recorded and not trained: main, main-summary, "
        "sub-agent, sub-agent-summary, side",
    )
    emulated_tokens_per_s: float = Field(
        default=20_000.0,
        ge=0,
        le=1e9,
        description='speed of a cell with topology.cell = "emulated"; 0 takes no time',
    )
