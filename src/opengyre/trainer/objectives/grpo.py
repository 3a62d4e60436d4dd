"""Objectives with one clipped ratio per token: GRPO and Dr.GRPO.

Must not know averaging, which is where the two differ.
"""

from torch import Tensor

from opengyre.trainer.objectives.ratios import (
    clipped_surrogate,
    old_logprobs,
    ratio_of,
    token_losses,
    truncated_weight,
)
from opengyre.trainer.objectives.signature import ObjectiveSettings, TokenLosses, Trained


def grpo(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
    """l_t = -c_t min(r_t A_e, clip(r_t, low, high) A_e), r_t = exp(logp_new - logp_old),
    c_t = min(exp(logp_old - logp_rollout), cap), detached.

    Averaged over an execution's tokens, then over executions; A_e = (R - mean) / std.
    Source: DeepSeekMath, arXiv 2402.03300 (its KL term: `training.kl_coefficient`).
    """
    logp_old = old_logprobs(logp_new, trained, settings)
    ratio = ratio_of(logp_new - logp_old)
    weight = truncated_weight(logp_old - trained.logp_rollout, settings)
    advantage = trained.advantages[trained.path_of_token]
    return token_losses(*clipped_surrogate(ratio, weight, advantage, settings))


def dr_grpo(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
    """l_t as GRPO's. What Dr.GRPO removes is outside of it: 1 / T_e becomes a constant
    (averaging "constant") and A_e = R - mean without the std (advantage "mean").

    Source: Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """
    return grpo(logp_new, trained, settings)
