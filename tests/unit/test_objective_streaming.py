"""Averaging in streamed form: any split over micro-steps and cells is the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opengyre.config.objectives import defaults_of
from opengyre.seams.cells import StepCounts
from opengyre.trainer.loss import Averaging, StreamedLoss
from opengyre.trainer.objectives.catalog import OBJECTIVES
from opengyre.trainer.objectives.signature import ObjectiveSettings, OldPolicy
from tests.unit.objective_batches import TrainedPath, tensors

NUM_WEIGHTS = 6
KL = 0.3
CONSTANT_TOKENS = 7
MAX_DRIFT = 0.4
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class _Work:
    """A path and its tokens' features: logp = -softplus(features @ weights)."""

    path: TrainedPath
    features: Tensor
    reference: Tensor


def _logprobs(features: Tensor, weights: Tensor) -> Tensor:
    return -torch.nn.functional.softplus(features @ weights)


def _weights() -> Tensor:
    return torch.linspace(-0.5, 0.7, NUM_WEIGHTS, dtype=torch.float64).requires_grad_()


@st.composite
def _executions(draw: st.DrawFn) -> list[list[_Work]]:
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=5)
    )
    return [_execution(lengths, numbers) for lengths in shapes]


def _execution(lengths: list[int], numbers: np.random.Generator) -> list[_Work]:
    advantage = float(numbers.normal())
    works = []
    for num_tokens in lengths:
        features = torch.from_numpy(numbers.normal(size=(num_tokens, NUM_WEIGHTS)))
        new = _logprobs(features, _weights()).detach()
        rollout = new + torch.from_numpy(numbers.uniform(-MAX_DRIFT, MAX_DRIFT, num_tokens))
        path = TrainedPath(advantage, sum(lengths), new.tolist(), rollout.tolist())
        reference = new + torch.from_numpy(numbers.normal(size=num_tokens))
        works.append(_Work(path, features, reference))
    return works


def _loss(name: str, averaging: Averaging, old: OldPolicy, kl_coefficient: float) -> StreamedLoss:
    own = defaults_of(name)
    return StreamedLoss(
        objective=OBJECTIVES[name],
        settings=ObjectiveSettings(old=old, clip_low=own.clip_low, clip_high=own.clip_high),
        averaging=averaging,
        constant_tokens=CONSTANT_TOKENS,
        kl_coefficient=kl_coefficient,
    )


def _summed(loss: StreamedLoss, works: Sequence[_Work], weights: Tensor) -> Tensor:
    _, trained = tensors([work.path for work in works])
    features = torch.cat([work.features for work in works])
    reference = torch.cat([work.reference for work in works])
    total, _ = loss.summed(
        _logprobs(features, weights), trained, reference if loss.kl_coefficient else None
    )
    return total


def _counts(works: Sequence[_Work], loss_sum: float) -> StepCounts:
    paths = [work.path for work in works]
    return StepCounts(
        num_executions=sum(len(path.new) / path.num_execution_tokens for path in paths),
        num_tokens=sum(len(path.new) for path in paths),
        loss_sum=loss_sum,
    )


def _streamed(
    loss: StreamedLoss, cells: Sequence[Sequence[Sequence[_Work]]]
) -> tuple[float, Tensor]:
    """Each cell sums over its micro-steps, the core sums over cells and divides once."""
    gradient = torch.zeros(NUM_WEIGHTS, dtype=torch.float64)
    loss_sum, num_executions, num_tokens = 0.0, 0.0, 0
    for micro_steps in cells:
        weights = _weights()
        for works in micro_steps:
            total = _summed(loss, works, weights)
            total.backward()
            counts = _counts(works, float(total.detach()))
            num_executions += counts.num_executions
            num_tokens += counts.num_tokens
            loss_sum += counts.loss_sum
        if weights.grad is not None:
            gradient += weights.grad
    divisor = loss.divisor(StepCounts(num_executions=num_executions, num_tokens=num_tokens))
    return loss_sum / divisor, gradient / divisor


def _batch(loss: StreamedLoss, executions: Sequence[Sequence[_Work]]) -> tuple[float, Tensor]:
    """The definition of the average, written out over whole executions."""
    weights = _weights()
    plain = StreamedLoss(
        objective=loss.objective,
        settings=loss.settings,
        averaging=Averaging.TOKEN,
        kl_coefficient=loss.kl_coefficient,
    )
    sums = torch.stack([_summed(plain, works, weights) for works in executions])
    lengths = torch.tensor([sum(len(work.path.new) for work in works) for works in executions])
    value = {
        Averaging.EXECUTION: (sums / lengths).mean(),
        Averaging.TOKEN: sums.sum() / lengths.sum(),
        Averaging.CONSTANT: (sums / CONSTANT_TOKENS).mean(),
    }[loss.averaging]
    value.backward()
    assert weights.grad is not None
    return float(value.detach()), weights.grad


@settings(max_examples=40, deadline=None)
@given(
    executions=_executions(),
    loss=st.builds(
        _loss,
        name=st.sampled_from(list(OBJECTIVES)),
        averaging=st.sampled_from(list(Averaging)),
        old=st.sampled_from(list(OldPolicy)),
        kl_coefficient=st.sampled_from([0.0, KL]),
    ),
    num_micro_steps=st.integers(1, 6),
    num_cells=st.integers(1, 4),
    dealer=st.randoms(use_true_random=False),
)
def test_any_split_over_micro_steps_and_cells_gives_the_loss_and_gradient_of_the_batch(
    executions: list[list[_Work]],
    loss: StreamedLoss,
    num_micro_steps: int,
    num_cells: int,
    dealer: Random,
) -> None:
    works = [work for one in executions for work in one]
    dealer.shuffle(works)
    micro_steps = [part for part in _dealt(works, num_micro_steps, dealer) if part]
    value, gradient = _streamed(loss, _dealt(micro_steps, num_cells, dealer))
    want_value, want_gradient = _batch(loss, executions)
    assert value == pytest.approx(want_value, rel=1e-9, abs=1e-12)
    scale = float(want_gradient.abs().max())
    assert float((gradient - want_gradient).abs().max()) <= 1e-9 * scale + 1e-15


def _dealt(things: Sequence[Thing], num_hands: int, dealer: Random) -> list[list[Thing]]:
    hands: list[list[Thing]] = [[] for _ in range(num_hands)]
    for thing in things:
        dealer.choice(hands).append(thing)
    return hands


def test_averagings_weigh_a_long_and_a_short_execution_differently() -> None:
    """Two on-policy executions of 1 and 3 tokens and advantage 1: by hand."""
    short = TrainedPath(1.0, 1, [-0.5], [-0.5])
    long = TrainedPath(1.0, 3, [-0.5] * 3, [-0.5] * 3)
    want = {
        Averaging.EXECUTION: [1 / 2, 1 / 6, 1 / 6, 1 / 6],
        Averaging.TOKEN: [1 / 4] * 4,
        Averaging.CONSTANT: [1 / (2 * CONSTANT_TOKENS)] * 4,
    }
    counts = StepCounts(num_executions=2.0, num_tokens=4)
    for averaging, shares in want.items():
        loss = _loss("grpo", averaging, OldPolicy.ROLLOUT, 0.0)
        logp_new, trained = tensors([short, long])
        loss.summed(logp_new, trained)[0].backward()
        assert logp_new.grad is not None
        got = (-logp_new.grad / loss.divisor(counts)).tolist()
        assert got == pytest.approx(shares, rel=1e-14)


def test_the_divergence_is_averaged_like_the_losses() -> None:
    path = TrainedPath(0.0, 2, [-1.0, -1.0], [-1.0, -1.0])
    logp_new, trained = tensors([path])
    loss = _loss("grpo", Averaging.EXECUTION, OldPolicy.ROLLOUT, KL)
    total, _ = loss.summed(logp_new, trained, torch.tensor([-1.0, -2.0], dtype=torch.float64))
    assert float(total.detach()) == pytest.approx(KL * (np.exp(-1.0) + 1.0 - 1.0) / 2)
