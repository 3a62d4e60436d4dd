"""`schedule.oversample` and `schedule.filter_zero_variance`, live and in a scenario."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from opengyre.config.schedule import ScheduleConfig, group_problems, num_groups_ahead
from opengyre.config.simulation import SimulatedSchedule, SimulationConfig, simulation_problems
from opengyre.control.config import SchedulerConfig
from opengyre.simulate.from_config import scenario_of
from tests.unit.control_desk import make_config

BOTH = pytest.mark.parametrize("section", [ScheduleConfig, SimulatedSchedule])
SHAPES = [(1, 0, 1.0), (2, 1, 1.0), (2, 1, 1.1), (1, 0, 1.5), (3, 2, 2.0), (2, 0, 2.51)]


@BOTH
@pytest.mark.parametrize(("mu", "phi", "oversample"), SHAPES)
def test_the_default_bound_is_that_of_the_scheduler_and_no_less_is_taken(
    section: Any, mu: int, phi: int, oversample: float
) -> None:
    numbers = {"steps_per_burst": mu, "run_ahead": phi, "oversample": oversample}
    config = make_config(groups_per_step=16, **numbers)
    assert section(**numbers).max_staleness == config.staleness_bound
    least = config.least_staleness
    assert group_problems(section(**numbers, max_staleness=least)) == []
    if least > 0:
        (problem,) = group_problems(section(**numbers, max_staleness=least - 1))
        assert f"expected at least {least} " in problem
        assert ("oversampled" in problem) == (oversample > 1)


@BOTH
def test_fewer_groups_than_steps_take_are_refused(section: Any) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        section(oversample=0.9)


def scenario(**schedule: Any) -> SimulationConfig:
    return SimulationConfig.model_validate(
        {
            "scenario": {"name": "one", "num_steps": 4},
            "topology": {"num_cells": 2, "devices_per_cell": 1, "slots_per_device": 8},
            "schedule": schedule,
            "costs": {"training": {"group_device_s": 1.0}},
            "workload": {"mean_s": 60.0, "zero_variance_share": 0.25},
        },
        context={"folder": Path("/")},
    )


def test_a_scenario_hands_both_to_the_scheduler_and_the_share_to_the_workload() -> None:
    made = scenario_of(scenario(oversample=1.5, filter_zero_variance=True))
    assert made.scheduler.oversample == 1.5
    assert made.scheduler.filter_zero_variance
    draws = [made.workload.draw(1, group, member) for group in range(400) for member in range(2)]
    pairs = zip(draws[::2], draws[1::2], strict=True)
    num_flat = sum(one.reward == two.reward for one, two in pairs)
    assert 70 < num_flat < 130


def test_oversampled_executions_count_against_what_fits_into_memory() -> None:
    numbers = {"groups_per_step": 50_000, "steps_per_burst": 2, "run_ahead": 0, "group_size": 16}
    assert simulation_problems(scenario(**numbers)) == []
    (problem,) = simulation_problems(scenario(**numbers, oversample=1.5))
    assert "not 2_400_000" in problem


def test_a_journal_from_before_both_keys_gives_a_scheduler_without_them() -> None:
    config = make_config()
    fields = asdict(config)
    del fields["oversample"], fields["filter_zero_variance"]
    assert msgspec.convert(fields, SchedulerConfig) == config


def test_the_warning_of_work_that_runs_ahead_counts_what_is_oversampled() -> None:
    numbers = {"groups_per_step": 16, "steps_per_burst": 2, "run_ahead": 1}
    assert num_groups_ahead(ScheduleConfig(**numbers)) == 16
    assert num_groups_ahead(ScheduleConfig(**numbers, oversample=1.5)) == 40
