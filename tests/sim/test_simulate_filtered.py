"""Groups without variance in the simulator: how many steps they make short, and what helps."""

from dataclasses import replace

import pytest

from opengyre.control.config import SchedulerConfig
from opengyre.simulate.result import Result
from opengyre.simulate.workload import Endings
from opengyre.simulate.world import simulate
from tests.sim.simulate_scenarios import make_config, make_scenario

NUM_STEPS, B = 40, 8
SEEDS = range(1, 4)


def some_config(*, oversample: float = 1.0, **numbers: object) -> SchedulerConfig:
    """No run-ahead and a boundary after each step: nothing else makes up for a filtered group."""
    return make_config(
        num_steps=NUM_STEPS,
        groups_per_step=B,
        steps_per_burst=1,
        slots=24,
        oversample=oversample,
        **{"run_ahead": 0, "filter_zero_variance": True, **numbers},
    )


def run(config: SchedulerConfig, *, share: float, seed: int) -> Result:
    endings = Endings(zero_variance_share=share)
    return simulate(make_scenario(config=config, endings=endings), seed)


def short_share(config: SchedulerConfig, *, share: float) -> float:
    results = [run(config, share=share, seed=seed) for seed in SEEDS]
    assert not any(one.failed for one in results)
    assert all(one.num_dropped == 0 for one in results)
    return sum(one.num_short for one in results) / (NUM_STEPS * len(results))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_oversampling_by_one_over_what_is_left_makes_most_short_steps_full(share: float) -> None:
    """1 / (1 - q) covers the mean: fewer steps are short. Half as much again covers its spread."""
    plain = short_share(some_config(), share=share)
    covered = short_share(some_config(oversample=1 / (1 - share)), share=share)
    ample = short_share(some_config(oversample=1.5 / (1 - share)), share=share)
    assert plain > 0.85
    assert covered < 0.5 * plain
    assert ample < 0.05


def test_a_run_that_runs_ahead_is_oversampled_already() -> None:
    """With phi = mu a step is short only if more than half of the groups are filtered."""
    assert short_share(some_config(run_ahead=1), share=0.25) < 0.1


def test_the_share_of_filtered_groups_is_the_share_without_variance() -> None:
    config = some_config(oversample=2.0)
    results = [run(config, share=0.3, seed=seed) for seed in SEEDS]
    num_filtered = sum(one.num_filtered for one in results)
    num_dispatched = sum(one.num_dispatched for one in results) / config.group_size
    assert 0.25 < num_filtered / num_dispatched < 0.35


def test_what_is_not_filtered_for_want_of_a_filter_is_trained() -> None:
    config = replace(some_config(), filter_zero_variance=False)
    result = run(config, share=0.5, seed=1)
    assert (result.num_filtered, result.num_short) == (0, 0)


def test_the_scheduler_is_the_same_without_filter_and_oversampling() -> None:
    plain = replace(some_config(), filter_zero_variance=False)
    assert run(plain, share=0.0, seed=1) == run(some_config(), share=0.0, seed=1)
