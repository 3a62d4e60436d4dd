"""What a pipeline stage computes, as the executor sees it.

Owns: the interface between the executor (order, transport, times) and the computing part of one
stage. Must not know: models, losses, sums, how tensors travel.
Invariants: each `Passed` a forward returns is given to `backward` once, in the order of the
forwards; a part keeps nothing of a micro-step outside its `Passed`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from opengyre.seams.cells import MicroStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the last stage found out about a micro-step; it travels upstream with the gradient."""

    loss_sum: float = 0.0
    num_clipped: int = 0
    divergence_sum: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The outcome of one forward.

    `sent` [n, T, hidden] is detached, for the next stage (None on the last stage); `told` is set on
    the last stage only; `graph` is private to the part.
    """

    sent: Tensor | None
    told: Told | None = None
    graph: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The backward of micro-step `number` ended on stage 0: its gradients count on all stages."""

    number: int
    told: Told


class StagePart(Protocol):
    def forward(self, micro_step: MicroStep, received: Tensor | None) -> Passed:
        """`received` [n, T, hidden], detached (None on the first stage); n = 2 when the line of the
        KL reference travels along: line 1 gets no gradient."""
        ...

    def backward(self, passed: Passed, gradient: Tensor | None) -> Tensor | None:
        """Adds this stage's gradients to its sums.

        `gradient` [T, hidden] is that of `passed.sent[0]` (None on the last stage). Returns the
        gradient [T, hidden] of `received[0]` (None on the first stage).
        """
        ...
