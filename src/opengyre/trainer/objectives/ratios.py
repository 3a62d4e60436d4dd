"""The parts objectives are made of: the old policy, its truncated weight, the clipped surrogate.

Must not know which objective uses them. Invariant: weights are detached, ratios are not.
"""

import torch
from torch import Tensor

from opengyre.trainer.objectives.signature import (
    ObjectiveSettings,
    OldPolicy,
    TokenLosses,
    Trained,
)

MAX_LOG_RATIO = 20.0
"""Far outside of every interval; the exponential of more than 88 is no float32."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), without gradient beyond exp(20): one odd token must not cost a step."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def old_logprobs(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> Tensor:
    """logp_old [M]. ROLLOUT: the ratio new / old is the whole drift of trainer from sampler.
    STEP: the ratio is 1 and carries the gradient alone; the drift is in the weight."""
    return logp_new.detach() if settings.old is OldPolicy.STEP else trained.logp_rollout


def truncated_weight(log_weight: Tensor, settings: ObjectiveSettings) -> Tensor:
    """c = min(exp(log_weight), cap), detached: truncated importance sampling, log_weight being
    logp_old - logp_rollout, so c = 1 with old = ROLLOUT.

    Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), a
    web note: min(pi_trainer / pi_sampler, C) before the policy gradient.
    """
    return ratio_of(log_weight.detach()).clamp(max=settings.max_token_weight)


def path_means(values: Tensor, trained: Trained) -> Tensor:
    """(1 / T_j) sum_t values_t, shape [J]."""
    sums = torch.zeros_like(trained.num_path_tokens).index_add(0, trained.path_of_token, values)
    return sums / trained.num_path_tokens


def clipped_surrogate(
    ratio: Tensor, weight: Tensor, advantage: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """-c min(r A, clip(r, low, high) A), and which entries are cut, all of one shape.

    Cut: with old = ROLLOUT where the interval takes the gradient away, with old = STEP (r = 1)
    where the weight reached the cap. Source: PPO (arXiv 1707.06347), its clipped objective.
    """
    free = ratio * advantage
    bound = ratio.clamp(settings.clip_low, settings.clip_high) * advantage
    is_step = settings.old is OldPolicy.STEP
    is_cut = weight >= settings.max_token_weight if is_step else bound < free
    return -weight * torch.minimum(free, bound), is_cut


def token_losses(losses: Tensor, is_cut: Tensor) -> TokenLosses:
    return TokenLosses(losses=losses, num_cut=int(is_cut.sum()))
