"""Objectives with one ratio per path (sequence): GSPO as published, and the paper's variant.

Must not know averaging. Invariant: all tokens of a path share their ratio, so a path is cut whole.
"""

from torch import Tensor

from opengyre.trainer.objectives.ratios import (
    clipped_surrogate,
    old_logprobs,
    path_means,
    ratio_of,
    token_losses,
    truncated_weight,
)
from opengyre.trainer.objectives.signature import ObjectiveSettings, TokenLosses, Trained


def gspo_paper(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
    """l_t = -c_t min(s_jt A_e, clip(s_jt, low, high) A_e), the default.

    s_j = exp((1 / T_j) sum_t (logp_new - logp_old)); s_jt = sg[s_j] exp(logp_new - sg[logp_new]):
    its value is s_j, its gradient per token (GSPO's token form);
    c_t = min(exp(logp_old - logp_rollout), cap) per token, detached.
    Source: PAPER.md (interval [0.995, 1.005], token weight cap 5); GSPO, arXiv 2507.18071.
    """
    logp_old = old_logprobs(logp_new, trained, settings)
    s_j = ratio_of(path_means(logp_new.detach() - logp_old, trained))
    ratio = s_j[trained.path_of_token] * (logp_new - logp_new.detach()).exp()
    weight = truncated_weight(logp_old - trained.logp_rollout, settings)
    advantage = trained.advantages[trained.path_of_token]
    return token_losses(*clipped_surrogate(ratio, weight, advantage, settings))


def gspo(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
    """l_t = -c_j min(s_j A_e, clip(s_j, low, high) A_e) for every token t of path j.

    s_j = exp((1 / T_j) sum_t (logp_new - logp_old)), differentiated through the mean;
    c_j = min(exp((1 / T_j) sum_t (logp_old - logp_rollout)), cap), detached: a path's weight, as
    its ratio. Summed over a path the gradient is s_j A_e sum_t grad logp_new, that of the token
    form. Source: Group Sequence Policy Optimization, arXiv 2507.18071; interval 3e-4 below and
    4e-4 above 1 (its section 5.1, as quoted by TRL's paper index).
    """
    logp_old = old_logprobs(logp_new, trained, settings)
    ratio = ratio_of(path_means(logp_new - logp_old, trained))
    weight = truncated_weight(path_means(logp_old - trained.logp_rollout, trained), settings)
    losses, is_cut = clipped_surrogate(ratio, weight, trained.advantages, settings)
    return token_losses(losses[trained.path_of_token], is_cut[trained.path_of_token])
