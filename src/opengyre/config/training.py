"""Settings of the update: `[training]`. docs/objectives.md has the formulas.

Owns: keys, defaults, bounds. Must not know: how gradients are summed or who computes them.
"""

from typing import Annotated, Literal

from pydantic import Field

from opengyre.config.base import Section
from opengyre.config.objectives import Advantage, Averaging, ObjectiveName, defaults_of

MAX_TOKEN_WEIGHT = 5.0

Role = Literal["main", "main-summary", "sub-agent", "sub-agent-summary", "side"]
Excess = Literal["train", "mask", "drop"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingConfig(Section):
    """Objective, advantage and optimizer."""

    objective: ObjectiveName = Field(
        default="gspo_paper",
        description="loss of a token: gspo_paper, gspo, grpo, dr_grpo, cispo, or a function of "
        "yours as file.py:function or module:function",
    )
    old: Literal["rollout", "step"] = Field(
        default="rollout",
        description="logprobs the ratio is taken against: recorded, or of the same pass",
    )
    clip_low: float = Field(
        default_factory=lambda data: defaults_of(data["objective"]).clip_low,
        ge=0,
        le=1,
        description='lower end of the ratio interval, with old = "rollout" (default the '
        "objective's, 0.995)",
    )
    clip_high: float = Field(
        default_factory=lambda data: defaults_of(data["objective"]).clip_high,
        ge=1,
        le=100,
        description='upper end of the ratio interval, with old = "rollout" (default the '
        "objective's, 1.005)",
    )
    max_token_weight: float = Field(
        default=MAX_TOKEN_WEIGHT,
        ge=1,
        le=1000,
        description='cap on a token\'s importance weight (old = "step")',
    )
    averaging: Averaging = Field(
        default_factory=lambda data: defaults_of(data["objective"]).averaging,
        description="mean over an execution's tokens and then over executions (execution), over "
        "all tokens (token), or sum by a constant for each execution (constant); default the "
        "objective's, execution",
    )
    averaging_tokens: int | None = Field(
        default=None,
        ge=1,
        description='constant of averaging = "constant"; left out: sampling.context_tokens',
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="weight of the divergence from the initial weights, of which every cell then "
        "keeps a copy; 0 keeps none",
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
    lookahead_groups: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="ready groups whose rows are put together before they are reached; when no "
        "more are left for a step, its largest parts are trained first",
    )
    advantage: Advantage = Field(
        default_factory=lambda data: defaults_of(data["objective"]).advantage,
        description="of a group's valid members: (R - mean) / (std + eps) is mean_std, R - mean is "
        "mean, R - mean of the others is leave_one_out; default the objective's, mean_std",
    )
    advantage_eps: float = Field(default=1e-6, gt=0, le=1, description="eps of the advantage")
    truncated: Excess = Field(
        default="train",
        description="executions ended by their deadline, or whose last main turn was cut by its "
        "length: train; mask: only their reward counts; drop: they take no part",
    )
    overlong: Excess = Field(
        default="train", description="the same of executions above overlong_tokens"
    )
    overlong_tokens: int = Field(
        default=0, ge=0, description="most sampled tokens of one execution; 0 is no bound"
    )
    max_paths: int = Field(
        default=5, ge=0, le=10_000, description="most paths of one execution (J_max); 0: all"
    )
    trained_roles: tuple[Role, ...] = Field(
        default=("main", "main-summary", "sub-agent", "sub-agent-summary"),
        min_length=1,
        description="roles whose calls are trained, paths of the first drawn first; calls of "
        "other roles are recorded and only context",
    )
    layout: Literal["tree", "path"] = Field(
        default="tree",
        description="compute what the paths of an execution share once, or path by path",
    )
    reduce: Literal["group", "star"] = Field(
        default="group",
        description="how the sums of several cells come to the core: all add them up together "
        "(group; after two failures the star), or the core pulls them one by one (star); emulated "
        "cells use the star",
    )
    emulated_tokens_per_s: float = Field(
        default=20_000.0,
        ge=0,
        le=1e9,
        description='speed of a cell with topology.cell = "emulated"; 0 takes no time',
    )


def excess_problems(training: TrainingConfig) -> list[str]:
    """`overlong` and `overlong_tokens` mean something together only."""
    if (training.overlong == "train") == (training.overlong_tokens == 0):
        return []
    return [
        f"training.overlong_tokens = {training.overlong_tokens}: expected a bound if and only if "
        f'training.overlong is "mask" or "drop"; it is "{training.overlong}"'
    ]


def role_problems(training: TrainingConfig) -> list[str]:
    roles = list(training.trained_roles)
    if len(set(roles)) == len(roles):
        return []
    return [f"training.trained_roles = {roles}: expected each once, the first drawn from first"]


def objective_problems(training: TrainingConfig) -> list[str]:
    if training.averaging_tokens is None or training.averaging == "constant":
        return []
    return [
        f"training.averaging_tokens = {training.averaging_tokens}: expected it beside "
        f'training.averaging = "constant"; it is "{training.averaging}"'
    ]


def objective_warnings(training: TrainingConfig) -> list[str]:
    """Combinations that run, but whose keys do less than they say."""
    own = defaults_of(training.objective)
    has_interval = (training.clip_low, training.clip_high) != (own.clip_low, own.clip_high)
    lines = []
    if training.old == "step" and has_interval:
        lines.append(
            "training.clip_low and training.clip_high do nothing with training.old = "
            '"step": the ratio is 1'
        )
    if training.old == "rollout" and training.max_token_weight != MAX_TOKEN_WEIGHT:
        lines.append(
            'training.max_token_weight does nothing with training.old = "rollout": the weight is 1'
        )
    if training.objective == "dr_grpo":
        lines += _normalisations(training)
    return lines


def _normalisations(training: TrainingConfig) -> list[str]:
    kept = []
    if training.averaging != "constant":
        kept.append(f'training.averaging = "{training.averaging}"')
    if training.advantage == "mean_std":
        kept.append('training.advantage = "mean_std"')
    if not kept:
        return []
    return [
        f"{' and '.join(kept)} brings back what dr_grpo takes out of grpo, the length and the "
        "std; leave it out"
    ]
