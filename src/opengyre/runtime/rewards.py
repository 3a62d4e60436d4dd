"""What the verdict of an execution becomes: its figures, its shaped reward, whether it takes part.

Owns: loading the transforms of a config, and telling of one that fails. Must not know: graders,
advantages. Invariants: an evaluation keeps its raw reward; no verdict stays no verdict; a reward
that could not be shaped takes no part in its group, and is not 0.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from opengyre.config.reward import FormatPenaltyConfig, RewardConfig
from opengyre.config.training import TrainingConfig
from opengyre.control.facts import Outcome, VerdictGiven
from opengyre.control.ids import ExecutionId
from opengyre.runtime.book import Execution, turn_number
from opengyre.runtime.callables import load_callable
from opengyre.seams.errors import ConfigError
from opengyre.seams.records import TurnRecord
from opengyre.seams.tasks import Verdict
from opengyre.trajectory.account import Reason
from opengyre.trajectory.advantages import Excess, ExcessSettings, excess_of
from opengyre.trajectory.shaping import (
    SAMPLE_STATS,
    BuiltIn,
    ExecutionStats,
    NamedTransform,
    ShapingError,
    Transform,
    format_penalty,
    length_penalty,
    shaped_reward,
)
from opengyre.trajectory.turns import Role

log = logging.getLogger(__name__)


class Rewards:
    """`settle` writes what becomes of a verdict into the book and gives the fact of it. `say`
    gets a line for each transform that fails, once."""

    def __init__(
        self,
        transforms: Sequence[NamedTransform],
        *,
        excess: ExcessSettings,
        say: Callable[[str], None],
    ) -> None:
        self._transforms = transforms
        self._excess = excess
        self._say = say
        self._said: set[str] = set()

    def settle(self, one: Execution, outcome: Outcome, verdict: Verdict) -> VerdictGiven:
        """To be called once, when all turns of `one` were told."""
        one.reward, one.has_verdict = verdict.reward, True
        words = ""
        if one.group is not None and verdict.reward is not None:
            words = self._shape(one, verdict.reward, stats_of(one.turns, outcome=outcome))
        is_trainable = one.exclusion is None and one.masked is None
        num_tokens = sum(t.num_completion_tokens for t in one.turns if t.is_committed)
        return VerdictGiven(
            execution=ExecutionId(one.execution),
            reward=one.reward,
            reason=verdict.reason,
            num_trainable_tokens=num_tokens if is_trainable else 0,
            shaped=one.shaped,
            exclusion=words,
        )

    def _shape(self, one: Execution, reward: float, stats: ExecutionStats) -> str:
        """Why it takes no part in its group, "" if it does."""
        ruling = excess_of(stats, self._excess)
        if ruling.policy is Excess.DROP:
            one.exclusion = ruling.reason
            return str(ruling.reason)
        if ruling.policy is Excess.MASK:
            one.masked = ruling.reason
        if not self._transforms:
            return ""
        try:
            one.shaped = shaped_reward(reward, stats, self._transforms)
        except ShapingError as error:
            one.exclusion = Reason.NO_SHAPED_REWARD
            self._tell_once(one.execution, error)
            return f"{Reason.NO_SHAPED_REWARD}: {error}"
        return ""

    def _tell_once(self, execution: str, error: ShapingError) -> None:
        log.warning("%s has no shaped reward: %s", execution, error)
        if error.transform not in self._said:
            self._said.add(error.transform)
            self._say(f"{execution} takes no part in its group, as others may: {error}")


def stats_of(turns: Iterable[TurnRecord], *, outcome: Outcome) -> ExecutionStats:
    """The figures of one execution, from the records of its last launch."""
    standing = {turn.turn: turn for turn in turns if turn.is_committed}
    in_order = [standing[name] for name in sorted(standing, key=turn_number)]
    tokens: Counter[str] = Counter()
    for turn in in_order:
        tokens[turn.role] += turn.num_completion_tokens
    main = [turn for turn in in_order if turn.role == "main"]
    return ExecutionStats(
        outcome=outcome.value,
        turns_by_role=_by_role(Counter(turn.role for turn in in_order)),
        tokens_by_role=_by_role(tokens),
        longest_context_tokens=max(map(_context_tokens, in_order), default=0),
        num_calls=sum(turn.num_calls for turn in in_order),
        num_malformed_calls=sum(turn.num_malformed_calls for turn in in_order),
        num_watched_calls=sum(turn.num_watched_calls for turn in in_order),
        num_truncated_turns=sum(turn.finish == "length" for turn in in_order),
        last_finish=main[-1].finish if main else "",
    )


def _context_tokens(turn: TurnRecord) -> int:
    return turn.num_kept_tokens + turn.num_new_prompt_tokens + turn.num_completion_tokens


def load_transforms(config: RewardConfig) -> tuple[NamedTransform, ...]:
    """Those of the config, each tried on a sample. Raises ConfigError."""
    transforms = tuple(
        NamedTransform(name=name, apply=_transform(name, config)) for name in config.transforms
    )
    for one in transforms:
        try:
            shaped_reward(1.0, SAMPLE_STATS, [one])
        except ShapingError as error:
            raise ConfigError(f"reward.transforms: on a sample, {error}") from error
    return transforms


def _transform(name: str, config: RewardConfig) -> Transform:
    match name:
        case BuiltIn.LENGTH_PENALTY if config.length_penalty is not None:
            return length_penalty(
                max_tokens=config.length_penalty.max_tokens,
                buffer_tokens=config.length_penalty.buffer_tokens,
                weight=config.length_penalty.weight,
            )
        case BuiltIn.FORMAT_PENALTY:
            return format_penalty(weight=(config.format_penalty or FormatPenaltyConfig()).weight)
        case _:
            return load_callable(name, key="reward.transforms")


def excess_settings(config: TrainingConfig) -> ExcessSettings:
    return ExcessSettings(
        truncated=Excess(config.truncated),
        overlong=Excess(config.overlong),
        overlong_tokens=config.overlong_tokens,
    )


def _by_role(counts: Counter[str]) -> dict[str, int]:
    """Every role, 0 where there is none of it."""
    return {role.value: counts[role.value] for role in Role}
