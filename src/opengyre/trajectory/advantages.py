"""Advantages of the executions of one group, relative to its valid members; who is valid.

Owns: baselines, and what happens to truncated and overlong executions. Must not know what a reward
means. Invariants: an execution without a value has no advantage and enters no mean; a group without
variance gives every valid member exactly 0.0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from opengyre.trajectory.account import Reason
from opengyre.trajectory.shaping import ExecutionStats

MIN_STD = 1e-8


class Baseline(StrEnum):
    """MEAN_STD: (R - mean) / (std + eps); MEAN: R - mean; LEAVE_ONE_OUT: R - mean of the others."""

    MEAN_STD = "mean_std"
    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"


class Excess(StrEnum):
    """What becomes of an execution that went too far.

    TRAIN: as any other. MASK: its reward stays in the baseline, none of its tokens is trained.
    DROP: it takes no part in its group.
    """

    TRAIN = "train"
    MASK = "mask"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessSettings:
    """Truncated: `ExecutionStats.is_truncated`. Overlong: it sampled more than `overlong_tokens`
    in its standing turns; 0 is no bound."""

    truncated: Excess = Excess.TRAIN
    overlong: Excess = Excess.TRAIN
    overlong_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """`reason` is None where nothing was too far."""

    policy: Excess = Excess.TRAIN
    reason: Reason | None = None


def excess_of(stats: ExecutionStats, settings: ExcessSettings) -> Ruling:
    """The stricter policy if an execution is both truncated and overlong; of equals, truncated."""
    found = []
    if stats.is_truncated:
        found.append(Ruling(policy=settings.truncated, reason=Reason.TRUNCATED))
    if 0 < settings.overlong_tokens < stats.num_sampled_tokens:
        found.append(Ruling(policy=settings.overlong, reason=Reason.OVERLONG))
    strictness = list(Excess)
    return max(found, key=lambda one: strictness.index(one.policy), default=Ruling())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """`values` in the order of the rewards; None where there was none."""

    values: tuple[float | None, ...]
    num_valid: int
    mean: float
    std: float

    @property
    def has_gradient(self) -> bool:
        return self.std >= MIN_STD


def group_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline, eps: float = 1e-6
) -> GroupAdvantages:
    """A_e over the n members that are valid; `rewards` has None for every other one.

    MEAN_STD: (R_e - mean R) / (std R + eps), std of the population (PAPER.md's objective, as
    measured in TRAINING.md). MEAN: R_e - mean R. LEAVE_ONE_OUT: R_e less the mean of the n - 1
    others, which is n / (n - 1) * (R_e - mean R) (RLOO, arXiv 2402.14740). A std below 1e-8, so
    also a single valid member, counts as none.
    """
    valid = [reward for reward in rewards if reward is not None]
    mean = math.fsum(valid) / len(valid) if valid else 0.0
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in valid) / len(valid)) if valid else 0.0
    scale = _scale(baseline, num_valid=len(valid), std=std, eps=eps) if std >= MIN_STD else 0.0
    values = tuple(None if r is None else (r - mean) * scale for r in rewards)
    return GroupAdvantages(values=values, num_valid=len(valid), mean=mean, std=std)


def _scale(baseline: Baseline, *, num_valid: int, std: float, eps: float) -> float:
    match baseline:
        case Baseline.MEAN_STD:
            return 1.0 / (std + eps)
        case Baseline.MEAN:
            return 1.0
        case Baseline.LEAVE_ONE_OUT:
            return num_valid / (num_valid - 1)
