"""The divergence from a reference policy, token by token.

Must not know where the reference comes from. Invariant: never negative.
"""

from torch import Tensor

from opengyre.trainer.objectives.ratios import MAX_LOG_RATIO


def k3(logp_new: Tensor, logp_reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = logp_reference - logp_new, shape [M].

    For tokens sampled from the new policy an unbiased estimate of KL(new || reference). Source:
    J. Schulman, "Approximating KL Divergence" (2020), estimator k3; used by DeepSeekMath, arXiv
    2402.03300. Its gradient is (1 - exp(d)) grad logp_new.
    """
    difference = (logp_reference - logp_new).clamp(max=MAX_LOG_RATIO)
    return difference.exp() - difference - 1
