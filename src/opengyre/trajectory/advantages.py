"""Advantages of the executions of one group, relative to its valid members.

Must not know what a reward means. Invariants: an execution without a verdict has no advantage
and enters no mean; a group without variance gives every valid member exactly 0.0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_STD = 1e-8


class Baseline(StrEnum):
    """MEAN_STD: (R - mean) / (std + eps); MEAN: R - mean."""

    MEAN_STD = "mean_std"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """`values` in the order of the rewards; None where there was no verdict."""

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
    """A_e = (R_e - mean R) / (std R + eps) over members with a verdict, std of the population.

    A std below 1e-8 counts as none (source: PAPER.md's objective, as measured in TRAINING.md).
    """
    valid = [reward for reward in rewards if reward is not None]
    mean = math.fsum(valid) / len(valid) if valid else 0.0
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in valid) / len(valid)) if valid else 0.0
    scale = 0.0
    if std >= MIN_STD:
        scale = 1.0 if baseline is Baseline.MEAN else 1.0 / (std + eps)
    values = tuple(None if r is None else (r - mean) * scale for r in rewards)
    return GroupAdvantages(values=values, num_valid=len(valid), mean=mean, std=std)
