"""What training gives when one process runs every path alone: plain forwards, a loop, AdamW.

Nothing here is of the trainer: formulas are written out.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opengyre.trainer.stage import StageSettings
from opengyre.trajectory.bundles import Row
from opengyre.trajectory.tree import line_ids
from tests.training_rows import line_logprobs, trained_depths

Weights = dict[str, np.ndarray[Any, Any]]


def logprobs_alone(model: nn.Module, ids: Sequence[int], temperature: float) -> Tensor:
    """Logprob of ids[1:], shape [T - 1], by a plain forward of one sequence."""
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    told: Tensor = (logits / temperature).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return told


@dataclass(frozen=True, kw_only=True)
class Plain:
    """After one update. `moments` by "exp_avg/name"; `grad_norm` is that before clipping."""

    weights: Weights
    moments: Weights
    grad_norm: float
    loss: float


class PlainTrainer:
    """Updates `model`; a divergence is measured from what it is now."""

    def __init__(self, model: nn.Module, settings: StageSettings) -> None:
        self._model = model
        self._settings = settings
        self._initial = copy.deepcopy(model).requires_grad_(False)
        self._num_updates = 0
        adamw = settings.optimizer
        self._adamw = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=adamw.betas, weight_decay=adamw.weight_decay
        )

    def update(self, rows: Sequence[Row]) -> Plain:
        settings = self._settings.optimizer
        self._num_updates += 1
        self._adamw.zero_grad()
        executions = {row.execution for row in rows}
        losses = [self._loss_of(row) for row in rows if not row.is_counted_only]
        loss = torch.stack(losses).sum() / len(executions)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), settings.max_grad_norm)
        share = min(1.0, self._num_updates / max(1, settings.warmup_updates))
        for group in self._adamw.param_groups:
            group["lr"] = settings.learning_rate * share
        self._adamw.step()
        named = dict(self._model.named_parameters())
        return Plain(
            weights={name: one.detach().numpy().copy() for name, one in named.items()},
            moments={
                f"{moment}/{name}": self._adamw.state[one][moment].numpy().copy()
                for name, one in named.items()
                for moment in ("exp_avg", "exp_avg_sq")
            },
            grad_norm=float(norm),
            loss=float(loss.detach()),
        )

    def _loss_of(self, row: Row) -> Tensor:
        """GSPO's token form over one path and k3 to the initial weights, over T_e."""
        loss, temperature = self._settings.loss, self._settings.temperature
        ids, depths = line_ids(row.path.leaf).tolist(), torch.tensor(trained_depths(row.path))
        new = logprobs_alone(self._model, ids, temperature)[depths - 1]
        old = torch.tensor(line_logprobs(row.path), dtype=torch.float64)[depths]
        ratio = (new.detach() - old).mean().exp() * (new - new.detach()).exp()
        clipped = ratio.clamp(loss.settings.clip_low, loss.settings.clip_high)
        losses = -torch.minimum(ratio * row.advantage, clipped * row.advantage)
        if loss.kl_coefficient:
            gap = logprobs_alone(self._initial, ids, temperature)[depths - 1] - new
            losses = losses + loss.kl_coefficient * (gap.exp() - gap - 1)
        return losses.sum() / row.num_execution_tokens


def worst_relative(got: Weights, want: Weights) -> float:
    """Over all tensors, each relative to its largest number; names must be the same."""
    assert got.keys() == want.keys()
    return max(
        float(np.abs(got[name] - want[name]).max() / (np.abs(want[name]).max() or 1.0))
        for name in want
    )
