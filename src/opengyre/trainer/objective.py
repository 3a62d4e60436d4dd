"""The objective in streamed form: what one micro-step adds to the loss sum, per token and path.

Owns: the formulas. Must not know models, cells or steps. Invariants: nothing here divides by a
number of executions; every function is pure and keeps the dtype of `logp_new`.

Letters: group g, execution e, path j, token t; m the trainable mask; T_j = sum_t m over a path;
T_e = sum_j T_j; A_e the advantage. Source: PAPER.md (GSPO variant: interval [0.995, 1.005],
token weight cap 5) and TRAINING.md, "Objective (streamed form)".
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class OldPolicy(StrEnum):
    """What logp_old is. ROLLOUT: the recorded sampling logprob. STEP: logp_new, detached."""

    ROLLOUT = "rollout"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoSettings:
    old: OldPolicy = OldPolicy.ROLLOUT
    clip_low: float = 0.995
    clip_high: float = 1.005
    max_token_weight: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The trained tokens (m = 1) of one micro-step, flat: M tokens over J paths.

    `logp_rollout` [M] recorded sampling logprobs; `path_of_token` [M] index of the path;
    `advantages` [J] A_e; `num_path_tokens` [J] T_j; `num_execution_tokens` [J] T_e.
    """

    logp_rollout: Tensor
    path_of_token: Tensor
    advantages: Tensor
    num_path_tokens: Tensor
    num_execution_tokens: Tensor


def sequence_log_ratio(logp_new: Tensor, logp_old: Tensor, trained: Trained) -> Tensor:
    """log s_j = (1 / T_j) sum_t (logp_new - logp_old), shape [J]: GSPO's sequence ratio."""
    sums = torch.zeros_like(trained.num_path_tokens)
    sums = sums.index_add(0, trained.path_of_token, logp_new - logp_old)
    return sums / trained.num_path_tokens


def token_ratio(logp_new: Tensor, logp_old: Tensor, trained: Trained) -> Tensor:
    """s_jt = sg[s_j] exp(logp_new - sg[logp_new]), shape [M]: its value is s_j, its gradient per
    token (GSPO-token form)."""
    s_j = sequence_log_ratio(logp_new.detach(), logp_old, trained).exp()
    return s_j[trained.path_of_token] * (logp_new - logp_new.detach()).exp()


def token_weight(logp_old: Tensor, trained: Trained, settings: GspoSettings) -> Tensor:
    """c_t = min(exp(logp_old - logp_rollout), cap), detached, shape [M]; 1 for old = ROLLOUT."""
    weight = (logp_old - trained.logp_rollout).detach().exp()
    return weight.clamp(max=settings.max_token_weight)


def token_losses(logp_new: Tensor, trained: Trained, settings: GspoSettings) -> tuple[Tensor, int]:
    """l_t = -c_t min(s_jt A_e, clip(s_jt, low, high) A_e), shape [M], and how many were cut.

    Cut: for old = ROLLOUT tokens whose gradient the interval removes, for old = STEP (where
    s_jt = 1) tokens whose weight reached the cap.
    """
    is_step = settings.old is OldPolicy.STEP
    logp_old = logp_new.detach() if is_step else trained.logp_rollout
    ratio = token_ratio(logp_new, logp_old, trained)
    weight = token_weight(logp_old, trained, settings)
    advantage = trained.advantages[trained.path_of_token]
    free = ratio * advantage
    cut = ratio.clamp(settings.clip_low, settings.clip_high) * advantage
    losses = -weight * torch.minimum(free, cut)
    is_cut = weight >= settings.max_token_weight if is_step else cut < free
    return losses, int(is_cut.sum())


def loss_sum(logp_new: Tensor, trained: Trained, settings: GspoSettings) -> tuple[Tensor, int]:
    """sum over tokens of l_t / T_e (a scalar, not divided by N), and how many tokens were cut.

    Over all micro-steps of a step these add up to sum_e L_e; dividing by N = sum T_j / T_e gives
    the batch loss, whatever the split.
    """
    losses, num_cut = token_losses(logp_new, trained, settings)
    return (losses / trained.num_execution_tokens[trained.path_of_token]).sum(), num_cut
