"""From token losses to a step's loss, in streamed form: sums first, one division at the end.

Owns: averaging. Must not know models or cells. Invariant: what micro-steps add, divided once by
`divisor` of their added counts, is the loss of the whole batch, whatever the split over
micro-steps and cells.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from torch import Tensor

from opengyre.seams.cells import StepCounts
from opengyre.trainer.objectives.gspo import gspo_paper
from opengyre.trainer.objectives.kl import k3
from opengyre.trainer.objectives.signature import Objective, ObjectiveSettings, Trained


class Averaging(StrEnum):
    """L = sum_e sum_t w l_t / D over a step with N executions and T trained tokens.

    EXECUTION: w = 1 / T_e, D = N: mean over an execution's tokens, then over executions.
    TOKEN: w = 1, D = T: every token weighs the same (source: DAPO, arXiv 2503.14476).
    CONSTANT: w = 1 / constant_tokens, D = N: no length normalisation (source: Dr.GRPO,
    arXiv 2503.20783).
    """

    EXECUTION = "execution"
    TOKEN = "token"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedLoss:
    """`constant_tokens` is read with CONSTANT only; `kl_coefficient` weighs k3 beside every
    token's loss."""

    objective: Objective = gspo_paper
    settings: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    averaging: Averaging = Averaging.EXECUTION
    constant_tokens: int = 1
    kl_coefficient: float = 0.0

    def summed(
        self, logp_new: Tensor, trained: Trained, logp_reference: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """sum_t w (l_t + kl_coefficient k3_t), a scalar, and how many tokens were cut."""
        made = self.objective(logp_new, trained, self.settings)
        losses = made.losses
        if logp_reference is not None:
            losses = losses + self.kl_coefficient * k3(logp_new, logp_reference)
        return self._weighted(losses, trained).sum(), made.num_cut

    def _weighted(self, losses: Tensor, trained: Trained) -> Tensor:
        match self.averaging:
            case Averaging.EXECUTION:
                return losses / trained.num_execution_tokens[trained.path_of_token]
            case Averaging.TOKEN:
                return losses
            case Averaging.CONSTANT:
                return losses / self.constant_tokens
            case _:
                assert_never(self.averaging)

    def divisor(self, counts: StepCounts) -> float:
        """D of what `counts` belongs to; above 0 if it has a trained token."""
        return counts.num_tokens if self.averaging is Averaging.TOKEN else counts.num_executions
