"""Gradient sums of all weights in one flat tensor, with a named view of each.

Must not know steps or models' meaning. Invariants: sums are float64 for float64 weights, else
float32; views stay valid until the buffer is dropped.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class FlatSums:
    """`flat` has one number per weight, in the order of the parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        first = next(iter(parameters.values()))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        num_weights = sum(parameter.numel() for parameter in parameters.values())
        self.flat = torch.zeros(num_weights, dtype=dtype, device=first.device)
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.views = self.split(self.flat)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat` by parameter name."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = torch.split(flat, sizes)
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def take_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add every `.grad` to the sums and clear it."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self.views[name].add_(parameter.grad)
                parameter.grad = None

    def first_non_finite(self, flat: Tensor) -> str | None:
        """Name of the first weight of which `flat` holds a number that is not finite."""
        if bool(flat.isfinite().all()):
            return None
        for name, view in self.split(flat).items():
            if not bool(view.isfinite().all()):
                return name
        return None
