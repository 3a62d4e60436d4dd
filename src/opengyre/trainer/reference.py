"""The policy a run began with, frozen, for the divergence from it.

Owns: a copy of the weights. Must not know losses or steps. Invariants: the copy is never written;
it lies in host memory, and on the module's device only between `place` and `remove`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Reference:
    """Runs `module` with the weights it had when this was made; the module keeps its own.

    On the CPU the copy stays where it is in both roles. On another device it gives way to the
    engine's cache at each role switch and comes back over the bus, which costs one copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in module.named_parameters()
        }
        self._placed: dict[str, Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self._weights.values())

    def place(self) -> None:
        device = next(self._module.parameters()).device
        self._placed = {name: one.to(device) for name, one in self._weights.items()}

    def remove(self) -> None:
        self._placed = None

    def run(self, forward: Callable[[Any], Tensor]) -> Tensor:
        """`forward(model)` without gradient, model being callable with keywords as the module."""
        placed = self._placed or self._weights

        def model(**inputs: Any) -> Any:
            return functional_call(self._module, placed, args=(), kwargs=inputs)

        with torch.no_grad():
            return forward(model)
