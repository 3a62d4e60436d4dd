"""Small batches of trained tokens for the tests of objectives, as lists and as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opengyre.trainer.objectives.signature import Trained


@dataclass(frozen=True)
class TrainedPath:
    advantage: float
    num_execution_tokens: int
    new: list[float]
    rollout: list[float]


PATHS = [
    TrainedPath(1.3, 5, [-0.1, -0.7, -1.2], [-0.12, -0.69, -1.25]),
    TrainedPath(1.3, 5, [-0.3, -0.4], [-0.9, -0.9]),
    TrainedPath(-0.8, 2, [-2.0, -0.05], [-1.5, -0.5]),
    TrainedPath(-0.8, 4, [-0.2, -3.0, -0.6, -0.1], [-0.9, -5.0, -0.8, -0.3]),
    TrainedPath(0.5, 1, [-0.02], [-4.0]),
]


def tensors(paths: Sequence[TrainedPath]) -> tuple[Tensor, Trained]:
    """`logp_new` [M] as a leaf that wants a gradient, and the rest, in float64."""
    nums = [len(path.new) for path in paths]

    def numbers(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    trained = Trained(
        logp_rollout=numbers([value for path in paths for value in path.rollout]),
        path_of_token=torch.repeat_interleave(torch.arange(len(paths)), torch.tensor(nums)),
        advantages=numbers([path.advantage for path in paths]),
        num_path_tokens=numbers(nums),
        num_execution_tokens=numbers([path.num_execution_tokens for path in paths]),
    )
    logp_new = numbers([value for path in paths for value in path.new]).requires_grad_()
    return logp_new, trained
