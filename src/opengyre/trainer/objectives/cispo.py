"""The objective that clips the importance weight and keeps every token's gradient: CISPO.

Must not know averaging.
"""

from torch import Tensor

from opengyre.trainer.objectives.ratios import (
    old_logprobs,
    ratio_of,
    token_losses,
    truncated_weight,
)
from opengyre.trainer.objectives.signature import (
    ObjectiveSettings,
    OldPolicy,
    TokenLosses,
    Trained,
)


def cispo(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
    """l_t = -c_t sg[clip(r_t, low, high)] A_e logp_new, r_t = exp(logp_new - logp_old),
    c_t = min(exp(logp_old - logp_rollout), cap), detached.

    Cut tokens keep a gradient: only their weight is bounded. The default interval [0, 5] has no
    lower bound, as in the source, and the cap of the other objectives above (the source gives
    no number). Source: MiniMax-M1, arXiv 2506.13585.
    """
    logp_old = old_logprobs(logp_new, trained, settings)
    ratio = ratio_of(logp_new.detach() - logp_old)
    clipped = ratio.clamp(settings.clip_low, settings.clip_high)
    weight = truncated_weight(logp_old - trained.logp_rollout, settings)
    advantage = trained.advantages[trained.path_of_token]
    is_step = settings.old is OldPolicy.STEP
    is_cut = weight >= settings.max_token_weight if is_step else clipped != ratio
    return token_losses(-weight * clipped * advantage * logp_new, is_cut)
