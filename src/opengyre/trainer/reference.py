"""The policy a run began with, frozen, for the divergence from it: one stage's part.

Owns: a copy of the part's weights. Must not know losses or steps. Invariants: the copy is never
written; it lies in host memory, and on the model's device only between `place` and `remove`.
"""

import torch
from torch import Tensor

from opengyre.seams.cells import MicroStep
from opengyre.trainer.stage_model import StageModel


class Reference:
    """Runs `model` with the weights it had when this was made; the model keeps its own.

    On the CPU the copy stays where it is in both roles. On another device it gives way to the
    engine's cache at each role switch and comes back over the bus, which costs one copy.
    """

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._weights = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in model.parameters.items()
        }
        self._placed: dict[str, Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self._weights.values())

    def place(self) -> None:
        device = next(iter(self._model.parameters.values())).device
        self._placed = {name: one.to(device) for name, one in self._weights.items()}

    def remove(self) -> None:
        self._placed = None

    def run(self, micro_step: MicroStep, received: Tensor | None, targets: Tensor) -> Tensor:
        """`StageModel.run` with the frozen weights and without gradient. `received` comes from the
        reference of the stage before."""
        placed = self._placed or self._weights
        with torch.no_grad():
            return self._model.run_with(placed, micro_step, received, targets)
