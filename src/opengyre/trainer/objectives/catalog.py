"""The objectives that ship, by their name in `training.objective`.

Invariant: the names are those for which the config has defaults.
"""

from opengyre.trainer.objectives.cispo import cispo
from opengyre.trainer.objectives.grpo import dr_grpo, grpo
from opengyre.trainer.objectives.gspo import gspo, gspo_paper
from opengyre.trainer.objectives.signature import Objective

OBJECTIVES: dict[str, Objective] = {
    one.__name__: one for one in (gspo_paper, gspo, grpo, dr_grpo, cispo)
}
