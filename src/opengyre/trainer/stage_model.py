"""The model's part of one pipeline stage: what a stage runs, and the role in which it runs it.

Owns: the seam between a stage and models; what training changes of a module that the engine holds
too. Must not know losses, steps, processes or where a model is cut. Invariants: outside
`enter`/`leave` the module is as the engine left it; names are the whole model's.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opengyre.seams.cells import MicroStep
from opengyre.trainer.packed_model import register_attention


class StageModel(Protocol):
    """Implemented by `cut.Cut` (one of P > 1 stages) and `whole_model.WholeModel` (P = 1).

    `parameters` by the whole model's names, a tied one once: a tied embedding is
    `model.embed_tokens.weight` on the first and on the last stage, each of which has a part of its
    gradient. Made outside training; run between `enter` and `leave` only.
    """

    parameters: dict[str, nn.Parameter]

    @property
    def weights_bytes(self) -> int:
        """Of all weights that this process holds: the engine's too, 0 while they are released."""
        ...

    def enter(self) -> None:
        """Packed attention, no dropout, every parameter wants a gradient. Idempotent."""
        ...

    def leave(self) -> None:
        """The module as it was before `enter`, gradients gone. Idempotent."""
        ...

    def release(self) -> None:
        """Give the weights' memory back; parameters stay the same objects. Nothing happens where
        the engine holds the weights too. Idempotent."""
        ...

    def acquire(self) -> None:
        """Memory for the weights again: NaN until a pull has written them. Idempotent."""
        ...

    def run(self, micro_step: MicroStep, received: Tensor | None, targets: Tensor) -> Tensor:
        """`received` is [T, hidden], None on the first stage. Returns [T, hidden], or on the last
        stage the logprobs [M] of the tokens at flat positions `targets` [M] under the sampler's
        temperature. `targets` are among the trained tokens; other stages do not look at them."""
        ...

    def run_with(
        self,
        weights: Mapping[str, Tensor],
        micro_step: MicroStep,
        received: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        """`run` with `weights`, of the names of `parameters`, in place of the model's own."""
        ...


class TrainingRole:
    """Takes `module` for training and gives it back as it was.

    `attention` is the implementation that holds meanwhile (None: the module's own). The module's
    own is the one it has now: parts of one module may enter and leave in any order.
    """

    def __init__(self, module: nn.Module, config: Any, *, attention: str | None) -> None:
        self._module = module
        self._config = config
        self._attention = attention
        self._is_training: dict[nn.Module, bool] | None = None
        self._is_trainable: dict[nn.Parameter, bool] = {}
        self._own_attention: str = config._attn_implementation

    def enter(self) -> None:
        if self._is_training is not None:
            return
        register_attention()
        self._is_training = {one: one.training for one in self._module.modules()}
        self._is_trainable = {one: one.requires_grad for one in self._module.parameters()}
        if self._attention is not None:
            self._config._attn_implementation = self._attention
        self._module.eval()
        for parameter in self._is_trainable:
            parameter.requires_grad_(True)

    def leave(self) -> None:
        before, self._is_training = self._is_training, None
        if before is None:
            return
        if self._attention is not None:
            self._config._attn_implementation = self._own_attention
        for module, is_training in before.items():
            module.training = is_training
        for parameter, is_trainable in self._is_trainable.items():
            parameter.grad = None
            parameter.requires_grad_(is_trainable)


def flat_tensors(micro_step: MicroStep, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and position ids, [T] each."""
    token_ids = torch.tensor(micro_step.token_ids, device=device)
    return token_ids, torch.tensor(micro_step.position_ids, device=device)
