"""Any causal language model of transformers as the one stage of a cell.

Owns: whether a model's attention can be replaced by the packed one, else each line by itself. Must
not know losses or steps. Invariants: a line's logprobs are those of the model alone on that line;
there is no dropout.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from opengyre.seams.cells import MicroStep
from opengyre.trainer.packed_model import ATTENTION, trained_logprobs
from opengyre.trainer.stage_model import TrainingRole, flat_tensors


class WholeModel:
    """StageModel of `module`, in memory that the engine may hold too."""

    def __init__(self, module: nn.Module, *, temperature: float) -> None:
        self.parameters = dict(module.named_parameters())
        self._module = module
        self._temperature = temperature
        self._role = TrainingRole(module, module.config, attention=ATTENTION)

    def enter(self) -> None:
        self._role.enter()

    def leave(self) -> None:
        self._role.leave()

    def release(self) -> None:
        """The engine holds the weights too."""

    def acquire(self) -> None:
        """They are there."""

    def run(self, micro_step: MicroStep, received: Tensor | None, targets: Tensor) -> Tensor:
        return self._run(self._module, micro_step, targets)

    def run_with(
        self,
        weights: Mapping[str, Tensor],
        micro_step: MicroStep,
        received: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        def module(**inputs: Any) -> Any:
            return functional_call(self._module, dict(weights), args=(), kwargs=inputs)

        return self._run(module, micro_step, targets)

    def _run(self, module: Any, micro_step: MicroStep, targets: Tensor) -> Tensor:
        token_ids, position_ids = flat_tensors(micro_step, targets.device)
        return trained_logprobs(
            module,
            token_ids=token_ids,
            position_ids=position_ids,
            segments=micro_step.segments,
            targets=targets,
            temperature=self._temperature,
        )
