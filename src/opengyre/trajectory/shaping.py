"""From a raw reward to the shaped one: transforms over what an execution was.

Owns: the figures a transform may look at, the built-in transforms, applying several in order.
Must not know: where a user's function came from, what a group is. Invariants: no clock enters, so
the same records give the same shaped reward; a transform that fails gives none, never 0.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

from opengyre.trajectory.turns import Role

MAX_WORDS_CHARS = 300


class BuiltIn(StrEnum):
    """Transforms that a config names by a word."""

    LENGTH_PENALTY = "length_penalty"
    FORMAT_PENALTY = "format_penalty"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionStats:
    """One execution that was graded, in counts over its standing turns.

    A turn stands by its last committed attempt; abandoned attempts and earlier launches count
    nowhere. `turns_by_role` and `tokens_by_role` (sampled tokens) hold every role: main,
    main-summary, sub-agent, sub-agent-summary, side. `longest_context_tokens` is the most tokens
    of one turn, prompt and answer. `num_calls` are the tool calls that could be read, of which
    `num_watched_calls` match `reward.watched_pattern`; `num_malformed_calls` could not be read.
    `num_truncated_turns` ended by "length"; `last_finish` is the end of the last main turn, "" if
    there is none. `outcome`: completed, failed, timed_out; lost if the reward is a placeholder.
    """

    outcome: str
    turns_by_role: Mapping[str, int]
    tokens_by_role: Mapping[str, int]
    longest_context_tokens: int
    num_calls: int
    num_malformed_calls: int
    num_watched_calls: int
    num_truncated_turns: int
    last_finish: str

    @property
    def num_turns(self) -> int:
        return sum(self.turns_by_role.values())

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.tokens_by_role.values())

    @property
    def is_truncated(self) -> bool:
        """It was ended before the agent ended it: by its deadline, or in its last main turn."""
        return self.outcome == "timed_out" or self.last_finish == "length"


Transform = Callable[[float, ExecutionStats], float]

SAMPLE_STATS = ExecutionStats(
    outcome="completed",
    turns_by_role={**dict.fromkeys(Role, 0), "main": 3, "side": 1},
    tokens_by_role={**dict.fromkeys(Role, 0), "main": 300, "side": 10},
    longest_context_tokens=900,
    num_calls=1,
    num_malformed_calls=1,
    num_watched_calls=0,
    num_truncated_turns=0,
    last_finish="stop",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTransform:
    """A transform and the words of the config for it."""

    name: str
    apply: Transform


MAX_SHAPED = 1e6
"""Beyond it nothing of a difference of rewards is left in a float's mean and variance."""


class ShapingError(ValueError):
    """`transform` gave no finite number; the text is one line and begins with its name."""

    def __init__(self, transform: str, words: str) -> None:
        super().__init__(f"{transform} {words[:MAX_WORDS_CHARS]}")
        self.transform = transform


def shaped_reward(
    reward: float, stats: ExecutionStats, transforms: Sequence[NamedTransform]
) -> float:
    """`transforms` one after the other, each on the answer of the one before. Raises ShapingError
    if one raises, or answers anything but a number of at most MAX_SHAPED in size."""
    for transform in transforms:
        reward = _applied(transform, reward, stats)
    return reward


def _applied(transform: NamedTransform, reward: float, stats: ExecutionStats) -> float:
    """Whatever a user's function does, also in its answer's own methods, is an error of it."""
    try:
        answer: object = transform.apply(reward, stats)
        is_number = isinstance(answer, Real) and not isinstance(answer, bool)
        if is_number and -MAX_SHAPED <= answer <= MAX_SHAPED:  # type: ignore[operator]  # Real
            return float(answer)  # type: ignore[arg-type]  # Real
        words = f"answered {answer!r:.80} ({type(answer).__name__}), not a finite number"
    except (Exception, SystemExit) as error:
        words = f"raised {traceback.format_exception_only(error)[-1]}"
        raise ShapingError(transform.name, _on_one_line(words)) from error
    raise ShapingError(transform.name, _on_one_line(words))


def _on_one_line(words: str) -> str:
    return "".join(one if one.isprintable() else " " for one in " ".join(words.split()))


def length_penalty(*, max_tokens: int, buffer_tokens: int, weight: float = 1.0) -> Transform:
    """R + weight * P, the soft overlong punishment of DAPO (arXiv 2503.14476, section 3.4).

    With L the sampled tokens of the execution, L_max = `max_tokens`, L_cache = `buffer_tokens`:
    P = 0 for L <= L_max - L_cache; ((L_max - L_cache) - L) / L_cache up to L_max; -1 beyond.
    """
    free_tokens = max_tokens - buffer_tokens

    def penalised(reward: float, stats: ExecutionStats) -> float:
        share = (stats.num_sampled_tokens - free_tokens) / buffer_tokens
        return reward - weight * min(max(share, 0.0), 1.0)

    return penalised


def format_penalty(*, weight: float = 1.0) -> Transform:
    """R - weight * malformed / (read + malformed), of tool calls; R without any call."""

    def penalised(reward: float, stats: ExecutionStats) -> float:
        num_calls = stats.num_calls + stats.num_malformed_calls
        return reward - weight * stats.num_malformed_calls / num_calls if num_calls else reward

    return penalised
