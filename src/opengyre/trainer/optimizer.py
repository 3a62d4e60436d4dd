"""The core's optimizer: AdamW with linear warm-up, and its state as plain tensors.

Owns: moments and the number of updates. Must not know how gradients were summed or divided.
Invariants: weights are written in place; what `state` gives, `load_state` restores bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opengyre.seams.errors import BoundaryError

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """`max_grad_norm` clips the divided gradient; the rate rises over `warmup_updates`."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_updates: int = 0
    max_grad_norm: float = 1.0


class CoreOptimizer:
    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamWSettings) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        self.num_updates = 0
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        settings = self._settings
        share = (self.num_updates + 1) / max(1, settings.warmup_updates)
        return settings.learning_rate * min(1.0, share)

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """One update with gradients that are divided and clipped already."""
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.num_updates += 1

    def state(self) -> dict[str, Tensor]:
        """Moments by "moment/name"; empty before the first update."""
        return {
            f"{moment}/{name}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in _MOMENTS
            if parameter in self._adamw.state
        }

    def state_names(self) -> list[str]:
        """Of what `state` gives after the first update."""
        return [f"{moment}/{name}" for name in self._parameters for moment in _MOMENTS]

    def load_state(self, tensors: Mapping[str, Tensor], *, num_updates: int) -> None:
        """The inverse of `state`. Raises BoundaryError if a moment is missing."""
        self._adamw.state.clear()
        self.num_updates = num_updates
        if num_updates == 0:
            return
        for name, parameter in self._parameters.items():
            missing = [m for m in _MOMENTS if f"{m}/{name}" not in tensors]
            if missing:
                raise BoundaryError(
                    "checkpoint", f"optimizer state has no {missing[0]}/{name}", retryable=False
                )
            moments = {m: tensors[f"{m}/{name}"].to(parameter.device, copy=True) for m in _MOMENTS}
            self._adamw.state[parameter] = {"step": torch.tensor(float(num_updates)), **moments}
