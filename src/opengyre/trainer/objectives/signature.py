"""What every objective takes and gives: a pure function of a micro-step's trained tokens.

Owns: the values that cross that border. Must not know formulas, models, cells or steps.
Invariants: an objective averages nothing and keeps the dtype of `logp_new`; gradients flow
through `logp_new` alone.

Letters: execution e, path j, trained token t; T_j = number of t on path j, T_e = sum_j T_j;
A_e the advantage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class OldPolicy(StrEnum):
    """What logp_old is. ROLLOUT: the recorded sampling logprob. STEP: logp_new, detached."""

    ROLLOUT = "rollout"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Numbers of all objectives: the ratio interval (acts with old = ROLLOUT) and the cap of
    the truncated importance weight (acts with old = STEP). The defaults are gspo_paper's."""

    old: OldPolicy = OldPolicy.ROLLOUT
    clip_low: float = 0.995
    clip_high: float = 1.005
    max_token_weight: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The trained tokens of one micro-step, flat: M tokens over J paths, each in one path.

    `logp_rollout` [M] recorded sampling logprobs; `path_of_token` [M] index of the path;
    `advantages` [J] A_e; `num_path_tokens` [J] T_j; `num_execution_tokens` [J] T_e.
    """

    logp_rollout: Tensor
    path_of_token: Tensor
    advantages: Tensor
    num_path_tokens: Tensor
    num_execution_tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """`losses` [M], one per trained token, to be minimised and not averaged; `num_cut` tokens
    that an interval or a cap bounded."""

    losses: Tensor
    num_cut: int = 0


Objective = Callable[[Tensor, Trained, ObjectiveSettings], TokenLosses]
