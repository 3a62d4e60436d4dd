import pytest
import torch
from torch import nn

from opengyre.seams.errors import BoundaryError
from opengyre.trainer.flat import FlatSums
from opengyre.trainer.optimizer import AdamWSettings, CoreOptimizer


def _parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 2))}


def _gradients(seed: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=numbers) for name, p in _parameters().items()}


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays() -> None:
    settings = AdamWSettings(learning_rate=4.0, warmup_updates=4)
    optimizer = CoreOptimizer(_parameters(), settings)
    rates = []
    for _ in range(6):
        rates.append(optimizer.learning_rate)
        optimizer.apply(_gradients(0))
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_without_warm_up_the_first_update_has_the_whole_rate() -> None:
    assert CoreOptimizer(_parameters(), AdamWSettings(learning_rate=2.0)).learning_rate == 2.0


def test_an_update_writes_in_place_and_clears_gradients() -> None:
    parameters = _parameters()
    view = parameters["a"].detach().numpy()
    optimizer = CoreOptimizer(parameters, AdamWSettings(learning_rate=0.1))
    optimizer.apply({"a": torch.ones(3), "b": torch.zeros(2, 2)})
    assert view == pytest.approx([0.9, 0.9, 0.9], abs=1e-6)
    assert all(parameter.grad is None for parameter in parameters.values())


def test_a_restored_state_continues_bit_for_bit() -> None:
    settings = AdamWSettings(learning_rate=0.1, warmup_updates=3)
    ours, theirs = _parameters(), _parameters()
    first = CoreOptimizer(ours, settings)
    for seed in range(2):
        first.apply(_gradients(seed))
    second = CoreOptimizer(theirs, settings)
    second.load_state(first.state(), num_updates=first.num_updates)
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    first.apply(_gradients(2))
    second.apply(_gradients(2))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_state_without_a_moment_is_refused_by_name() -> None:
    optimizer = CoreOptimizer(_parameters(), AdamWSettings(learning_rate=0.1))
    assert optimizer.state() == {}
    with pytest.raises(BoundaryError, match="exp_avg/a"):
        optimizer.load_state({}, num_updates=1)


def test_sums_are_float32_for_float32_weights_and_float64_for_float64() -> None:
    single = FlatSums(_parameters())
    double = FlatSums({"a": nn.Parameter(torch.ones(3, dtype=torch.float64))})
    assert (single.flat.dtype, double.flat.dtype) == (torch.float32, torch.float64)


def test_gradients_add_up_and_are_taken_away() -> None:
    parameters = _parameters()
    sums = FlatSums(parameters)
    for _ in range(2):
        parameters["b"].grad = torch.full((2, 2), 1.5)
        sums.take_gradients(parameters)
    assert sums.flat.tolist() == [0, 0, 0, 3, 3, 3, 3]
    assert parameters["b"].grad is None


def test_the_first_weight_with_a_number_that_is_not_finite_is_named() -> None:
    sums = FlatSums(_parameters())
    assert sums.first_non_finite(sums.flat) is None
    sums.views["b"][1, 0] = float("nan")
    assert sums.first_non_finite(sums.flat) == "b"
