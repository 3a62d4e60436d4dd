"""Settings of what a reward becomes before it is compared inside its group: `[reward]`.

Owns: keys, defaults, bounds. Must not know: how a transform is loaded or applied.
"""

from pydantic import Field

from opengyre.config.base import Regex, Section, TransformName
from opengyre.config.watched import WATCHED_PATTERN


class LengthPenaltyConfig(Section):
    """`[reward.length_penalty]`: nothing up to max - buffer, then linear down to -weight at max."""

    max_tokens: int = Field(
        ge=1, description="sampled tokens of an execution at which the whole weight is taken off"
    )
    buffer_tokens: int = Field(
        ge=1, description="tokens below max_tokens over which the penalty grows from 0"
    )
    weight: float = Field(default=1.0, gt=0, le=1e6, description="the most it takes off")


class FormatPenaltyConfig(Section):
    """`[reward.format_penalty]`: by the share of tool calls that could not be read."""

    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="taken off when every call was malformed"
    )


class RewardConfig(Section):
    """`[reward]`: shaped rewards reach the advantage, raw ones the evaluation and the reports."""

    transforms: tuple[TransformName, ...] = Field(
        default=(),
        description="applied in this order: length_penalty, format_penalty, file.py:function "
        "or module:function",
    )
    length_penalty: LengthPenaltyConfig | None = Field(
        default=None, description="used with the transform length_penalty, and needed there"
    )
    format_penalty: FormatPenaltyConfig | None = Field(
        default=None, description="used with the transform format_penalty; left out: weight 1"
    )
    watched_pattern: Regex = Field(
        default=WATCHED_PATTERN,
        description="regular expression of tool calls' arguments that are counted as watched: "
        'test files; "" watches nothing',
    )


def reward_problems(reward: RewardConfig) -> list[str]:
    """Rules that span several keys; each answer is one line."""
    named = list(reward.transforms)
    tables = {"length_penalty": reward.length_penalty, "format_penalty": reward.format_penalty}
    problems = [
        f"reward.transforms = {named}: expected {name} among them, because reward.{name} is given"
        for name, table in tables.items()
        if table is not None and name not in named
    ]
    if len(set(named)) < len(named):
        problems.append(f"reward.transforms = {named}: expected each once")
    penalty = reward.length_penalty
    if penalty is None and "length_penalty" in named:
        problems.append(
            "reward.length_penalty is missing: expected a table with max_tokens and buffer_tokens, "
            "because reward.transforms names length_penalty"
        )
    if penalty is not None and penalty.buffer_tokens > penalty.max_tokens:
        problems.append(
            f"reward.length_penalty.buffer_tokens = {penalty.buffer_tokens}: expected at most "
            f"reward.length_penalty.max_tokens = {penalty.max_tokens}"
        )
    return problems
