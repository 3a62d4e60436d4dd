import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.trajectory.advantages import Baseline, group_advantages

REWARDS = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)


def test_advantages_are_relative_to_the_mean_in_units_of_the_population_std() -> None:
    got = group_advantages([1.0, 0.0, 0.0, 1.0], baseline=Baseline.MEAN_STD, eps=0.5)
    assert got.values == (0.5, -0.5, -0.5, 0.5)
    assert (got.mean, got.std, got.num_valid) == (0.5, 0.5, 4)


def test_the_mean_baseline_does_not_divide() -> None:
    got = group_advantages([1.0, 0.0, 0.5], baseline=Baseline.MEAN)
    assert got.values == (0.5, -0.5, 0.0)


def test_no_verdict_is_not_zero() -> None:
    got = group_advantages([1.0, None, 0.0], baseline=Baseline.MEAN)
    assert got.values == (0.5, None, -0.5)
    assert got.num_valid == 2


@pytest.mark.parametrize("baseline", list(Baseline))
def test_a_group_without_variance_has_no_gradient_and_exact_zeros(baseline: Baseline) -> None:
    got = group_advantages([0.3, 0.3, 0.3, None], baseline=baseline)
    assert not got.has_gradient
    assert got.values == (0.0, 0.0, 0.0, None)


def test_a_group_without_any_verdict_is_empty_not_an_error() -> None:
    got = group_advantages([None, None], baseline=Baseline.MEAN_STD)
    assert got.values == (None, None)
    assert not got.has_gradient


@given(rewards=REWARDS)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(
    rewards: list[float | None],
) -> None:
    got = group_advantages(rewards, baseline=Baseline.MEAN_STD)
    pairs = [(r, a) for r, a in zip(rewards, got.values, strict=True) if r is not None]
    assert all(a is not None and math.isfinite(a) for _, a in pairs)
    assert math.fsum(a for _, a in pairs if a is not None) == pytest.approx(0, abs=1e-6)
    ordered = sorted(pairs, key=lambda pair: pair[0])
    assert all(x[1] <= y[1] + 1e-12 for x, y in itertools.pairwise(ordered))
