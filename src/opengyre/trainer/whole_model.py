"""Any causal language model of transformers as the one stage of a cell.

Owns: which way a model is run: lines packed in a row, or each by itself. Must not know losses or
steps. Invariants: a line's logprobs are those of the model alone on that line; there is no dropout.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from opengyre.seams.cells import MicroStep
from opengyre.trainer.lines_alone import can_keep_logits, logprobs_alone
from opengyre.trainer.packable import refuse_untrainable, why_not_packed
from opengyre.trainer.packed_model import ATTENTION, trained_logprobs
from opengyre.trainer.stage_memory import bytes_of
from opengyre.trainer.stage_model import TrainingRole, flat_tensors

log = logging.getLogger(__name__)


class WholeModel:
    """StageModel of `module`, whose weights the engine may hold too.

    Lines share a row (`is_packed`) if `packable.why_not_packed` finds nothing against it. Else each
    line is computed by itself, and what lines of a tree share once for each of them. Raises
    ConfigError for a model that cannot be trained.
    """

    def __init__(self, module: nn.Module, *, temperature: float) -> None:
        refuse_untrainable(module)
        reason = why_not_packed(module)
        self.parameters = dict(module.named_parameters())
        self.is_packed = not reason
        self._module = module
        self._temperature = temperature
        self._keeps_logits = can_keep_logits(module)
        attention = ATTENTION if self.is_packed else None
        self._role = TrainingRole(module, module.config, attention=attention)
        if reason:
            log.warning("each line is trained by itself, which costs what they share: %s", reason)

    @property
    def weights_bytes(self) -> int:
        return bytes_of(self.parameters.values())

    def enter(self) -> None:
        self._role.enter()

    def leave(self) -> None:
        self._role.leave()

    def release(self) -> None:
        """The engine holds the weights too."""

    def acquire(self) -> None:
        """They are there."""

    def run(self, micro_step: MicroStep, received: Tensor | None, targets: Tensor) -> Tensor:
        return self._logprobs(self._module, micro_step, targets)

    def run_with(
        self,
        weights: Mapping[str, Tensor],
        micro_step: MicroStep,
        received: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        def module(**inputs: Any) -> Any:
            return functional_call(self._module, dict(weights), args=(), kwargs=inputs)

        return self._logprobs(module, micro_step, targets)

    def _logprobs(self, module: Any, micro_step: MicroStep, targets: Tensor) -> Tensor:
        token_ids, position_ids = flat_tensors(micro_step, targets.device)
        if not self.is_packed:
            return logprobs_alone(
                module,
                token_ids=token_ids,
                paths=micro_step.paths,
                targets=targets,
                temperature=self._temperature,
                keeps_logits=self._keeps_logits,
            )
        return trained_logprobs(
            module,
            token_ids=token_ids,
            position_ids=position_ids,
            segments=micro_step.segments,
            targets=targets,
            temperature=self._temperature,
        )
