"""The loss a config asks for: shipped, or a function of the user's.

Imported only in processes that train (importing it imports torch). Must not know cells.
"""

from opengyre.config.root import RunConfig
from opengyre.runtime.callables import load_callable
from opengyre.trainer.loss import Averaging, StreamedLoss
from opengyre.trainer.objectives.catalog import OBJECTIVES
from opengyre.trainer.objectives.signature import ObjectiveSettings, OldPolicy


def loss_of(config: RunConfig) -> StreamedLoss:
    """Raises ConfigError for a function that cannot be loaded."""
    chosen = config.training
    shipped = OBJECTIVES.get(chosen.objective)
    return StreamedLoss(
        objective=shipped or load_callable(chosen.objective, key="training.objective"),
        settings=ObjectiveSettings(
            old=OldPolicy(chosen.old),
            clip_low=chosen.clip_low,
            clip_high=chosen.clip_high,
            max_token_weight=chosen.max_token_weight,
        ),
        averaging=Averaging(chosen.averaging),
        constant_tokens=chosen.averaging_tokens or config.sampling.context_tokens,
        kl_coefficient=chosen.kl_coefficient,
    )
