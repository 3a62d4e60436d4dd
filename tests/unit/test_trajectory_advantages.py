"""Advantages in closed form and what leaves them as they are; policies of excess."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.trajectory.account import Reason
from opengyre.trajectory.advantages import (
    Baseline,
    Excess,
    ExcessSettings,
    Ruling,
    excess_of,
    group_advantages,
)
from opengyre.trajectory.shaping import SAMPLE_STATS

REWARDS = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)
BASELINES = st.sampled_from(list(Baseline))
WHOLE = replace(SAMPLE_STATS, tokens_by_role={"main": 100})
CUT = replace(WHOLE, outcome="timed_out")


def values(rewards: Sequence[float | None], baseline: Baseline) -> tuple[float | None, ...]:
    return group_advantages(rewards, baseline=baseline).values


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


@given(rewards=REWARDS, baseline=BASELINES)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(
    rewards: list[float | None], baseline: Baseline
) -> None:
    got = group_advantages(rewards, baseline=baseline)
    pairs = [(r, a) for r, a in zip(rewards, got.values, strict=True) if r is not None]
    assert all(a is not None and math.isfinite(a) for _, a in pairs)
    assert math.fsum(a for _, a in pairs if a is not None) == pytest.approx(0, abs=1e-6)
    ordered = sorted(pairs, key=lambda pair: pair[0])
    assert all(x[1] <= y[1] + 1e-12 for x, y in itertools.pairwise(ordered))


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    assert values([1.0, 0.0, None, 0.5], Baseline.LEAVE_ONE_OUT) == pytest.approx(
        (0.75, -0.75, None, 0.0)
    )


@given(rewards=st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_leave_one_out_is_the_mean_of_the_others_and_n_over_n_less_one_of_the_mean(
    rewards: list[float],
) -> None:
    got = group_advantages(rewards, baseline=Baseline.LEAVE_ONE_OUT)
    if not got.has_gradient:
        return
    num = len(rewards)
    for index, value in enumerate(got.values):
        others = [one for at, one in enumerate(rewards) if at != index]
        assert value == pytest.approx(rewards[index] - math.fsum(others) / (num - 1), abs=1e-12)
        assert value == pytest.approx(num / (num - 1) * (rewards[index] - got.mean), abs=1e-12)


@pytest.mark.parametrize("baseline", list(Baseline))
def test_one_valid_member_alone_has_no_gradient(baseline: Baseline) -> None:
    got = group_advantages([None, 0.7, None], baseline=baseline)
    assert (got.values, got.has_gradient, got.num_valid) == ((None, 0.0, None), False, 1)


@given(
    rewards=st.lists(st.floats(0, 1), min_size=2, max_size=8),
    shift=st.floats(-10, 10),
    baseline=BASELINES,
)
def test_a_constant_added_to_every_reward_changes_nothing(
    rewards: list[float], shift: float, baseline: Baseline
) -> None:
    before = group_advantages(rewards, baseline=baseline)
    after = values([one + shift for one in rewards], baseline)
    if before.std > 1e-3:
        assert after == pytest.approx(before.values, abs=1e-6)


@given(
    rewards=st.lists(st.integers(0, 4).map(float), min_size=2, max_size=8),
    scale=st.sampled_from([0.5, 2.0, 8.0]),
)
def test_a_factor_on_every_reward_is_one_on_plain_baselines_and_none_in_units_of_std(
    rewards: list[float], scale: float
) -> None:
    scaled = [one * scale for one in rewards]
    for baseline in (Baseline.MEAN, Baseline.LEAVE_ONE_OUT):
        expected = [scale * one for one in values(rewards, baseline) if one is not None]
        assert values(scaled, baseline) == pytest.approx(expected)
    of_std = values(rewards, Baseline.MEAN_STD)
    assert values(scaled, Baseline.MEAN_STD) == pytest.approx(of_std, abs=1e-4)


@given(rewards=REWARDS, baseline=BASELINES, seed=st.randoms())
def test_the_order_of_members_and_the_absent_ones_change_no_advantage(
    rewards: list[float | None], baseline: Baseline, seed: random.Random
) -> None:
    got = values(rewards, baseline)
    present = [one for one in rewards if one is not None]
    assert values(present, baseline) == tuple(one for one in got if one is not None)
    order = list(range(len(rewards)))
    seed.shuffle(order)
    moved = values([rewards[at] for at in order], baseline)
    for at, value in zip(order, moved, strict=True):
        assert value == (None if got[at] is None else pytest.approx(got[at], abs=1e-9))


def test_nothing_is_too_far_unless_something_says_so() -> None:
    assert excess_of(WHOLE, ExcessSettings(truncated=Excess.DROP)) == Ruling()
    far = replace(WHOLE, tokens_by_role={"main": 10**9})
    assert excess_of(far, ExcessSettings(overlong=Excess.DROP)) == Ruling()


@pytest.mark.parametrize("policy", list(Excess))
def test_a_truncated_execution_gets_the_policy_of_truncated_ones(policy: Excess) -> None:
    found = excess_of(CUT, ExcessSettings(truncated=policy))
    assert found == Ruling(policy=policy, reason=Reason.TRUNCATED)


def test_an_execution_is_overlong_above_the_bound_not_at_it() -> None:
    settings = ExcessSettings(overlong=Excess.MASK, overlong_tokens=100)
    assert excess_of(WHOLE, settings) == Ruling()
    longer = replace(WHOLE, tokens_by_role={"main": 60, "sub-agent": 41})
    assert excess_of(longer, settings) == Ruling(policy=Excess.MASK, reason=Reason.OVERLONG)


@pytest.mark.parametrize(
    ("truncated", "overlong", "policy", "reason"),
    [
        (Excess.TRAIN, Excess.MASK, Excess.MASK, Reason.OVERLONG),
        (Excess.MASK, Excess.DROP, Excess.DROP, Reason.OVERLONG),
        (Excess.DROP, Excess.MASK, Excess.DROP, Reason.TRUNCATED),
        (Excess.MASK, Excess.MASK, Excess.MASK, Reason.TRUNCATED),
    ],
)
def test_the_stricter_policy_holds_for_an_execution_that_is_both(
    truncated: Excess, overlong: Excess, policy: Excess, reason: Reason
) -> None:
    settings = ExcessSettings(truncated=truncated, overlong=overlong, overlong_tokens=99)
    assert excess_of(CUT, settings) == Ruling(policy=policy, reason=reason)
