"""Scenarios made by seed, over all policies, costs and failures: the books always add up."""

import random
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from opengyre.control import commands as c
from opengyre.control.config import Overdue, PolicyName, SchedulerConfig
from opengyre.control.scheduler import Scheduler
from opengyre.simulate.costs import (
    CheckpointCosts,
    Costs,
    EngineCosts,
    GraderCosts,
    PublicationCosts,
    SwitchCosts,
    ToolCosts,
    TrainingCosts,
)
from opengyre.simulate.scenario import Failure, Scenario
from opengyre.simulate.workload import Endings
from tests.sim.simulate_scenarios import HOUR_S, make_config, make_scenario, recorded

NUM_SEEDS = 60


def some_config(rng: random.Random) -> SchedulerConfig:
    policy = rng.choice(list(PolicyName))
    num_cells = rng.randint(1, 5)
    num_standalone = rng.randint(1, 3)
    steps_per_burst, run_ahead = rng.randint(1, 3), rng.randint(0, 3)
    oversample = rng.choice([1.0, 1.0, 1.5, 2.0])
    numbers: dict[str, Any] = {
        "num_cells": num_cells,
        "num_standalone": num_standalone,
        "slots": rng.randint(3, 30),
        "policy": policy,
        "is_streaming": rng.random() < 0.7,
        "num_training_cells": rng.randint(1, num_cells) if policy is PolicyName.ASYNC else 0,
        "num_steps": rng.randint(1, 8),
        "group_size": rng.randint(1, 4),
        "groups_per_step": rng.randint(2, 6),
        "steps_per_burst": steps_per_burst,
        "run_ahead": run_ahead,
        "supply_fraction": rng.choice([1 / 16, 1 / 4, 1 / 2]),
        "supply_hold_s": rng.choice([0.0, 5.0, 300.0]),
        "max_staleness": ceil(oversample * (run_ahead + steps_per_burst)) - 1 + rng.randint(0, 2),
        "oversample": oversample,
        "filter_zero_variance": rng.random() < 0.5,
        "min_valid_members": 1,
        "max_void_in_a_row": 1000,
        "overdue": rng.choice(list(Overdue)),
        "publish_timeout_s": rng.choice([30.0, 1e6]),
        "num_eval_executions": rng.choice([0, 5]),
        "eval_every_bursts": rng.randint(0, 2),
        "eval_at_end": rng.random() < 0.5,
        "eval_deadline_s": rng.choice([600.0, 2 * HOUR_S]),
    }
    return make_config(**numbers)


def some_costs(rng: random.Random) -> Costs:
    def or_nothing(most: float) -> float:
        return rng.choice([0.0, rng.uniform(0.0, most)])

    return Costs(
        training=TrainingCosts(
            group_device_s=rng.uniform(10.0, 4000.0),
            efficiency=rng.uniform(0.5, 1.0),
            bubble_s=or_nothing(30.0),
            open_s=or_nothing(20.0),
            reduce_s=or_nothing(20.0),
            is_by_length=rng.random() < 0.5,
        ),
        engine=EngineCosts(
            load_slope=or_nothing(1.0),
            has_kv_handoff=rng.random() < 0.5,
            freeze_s=or_nothing(20.0),
            prefill_tokens_per_s=rng.uniform(1e3, 1e5),
        ),
        switch=SwitchCosts(join_s=or_nothing(25.0), load_s=or_nothing(60.0)),
        publication=PublicationCosts(expose_s=or_nothing(20.0), load_s=or_nothing(100.0)),
        checkpoint=CheckpointCosts(save_s=or_nothing(60.0)),
        grader=GraderCosts(grade_s=or_nothing(300.0), num_graders=rng.choice([None, 3])),
        tools=ToolCosts(share=rng.choice([0.0, 0.4, 1.0])),
    )


def some_scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    config = some_config(rng)
    names = [spec.engine for spec in config.engines]
    failures = tuple(
        Failure(
            at_s=rng.uniform(0.0, 8 * HOUR_S),
            engine=rng.choice(names),
            restart_after_s=rng.uniform(1.0, 400.0),
        )
        for _ in range(rng.choice([0, 0, 4]))
    )
    endings = Endings(
        overall_cap_s=rng.choice([None, 1.5 * HOUR_S]),
        no_verdict_rate=rng.choice([0.0, 0.2]),
        void_rate=rng.choice([0.0, 0.2]),
        zero_variance_share=rng.choice([0.0, 0.3]),
    )
    return make_scenario(config=config, costs=some_costs(rng), endings=endings, failures=failures)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_books_add_up_and_the_journal_replays(seed: int) -> None:
    scenario = some_scenario(seed)
    result, rows = recorded(scenario, seed)
    total_s = result.num_devices * result.wall_s
    assert sum(result.device_seconds.values()) == pytest.approx(total_s, rel=1e-9, abs=1e-6)
    assert min(result.device_seconds.values()) >= -1e-6
    assert sum(result.outcomes.values()) == result.num_dispatched
    assert result.aborted_s == 0.0
    assert 0.0 <= result.slack <= 1.0
    assert 0.0 <= result.occupancy <= 1.0
    scheduler = Scheduler(scenario.scheduler)
    for now_s, value in rows:
        if isinstance(value, c.Plan):
            assert scheduler.decide(now_s) == value
        else:
            scheduler.observe(value, now_s)


def test_the_sweep_covers_what_can_happen() -> None:
    results = [recorded(some_scenario(seed), seed)[0] for seed in range(0, NUM_SEEDS, 2)]
    assert sum(one.num_moves for one in results) > 50
    assert sum(one.num_replaced for one in results) > 10
    assert sum(one.num_void for one in results) > 5
    assert sum(one.num_filtered for one in results) > 5
    assert sum(one.redone_groups > 0 for one in results) > 1
    assert sum(not one.failed for one in results) > len(results) // 2
    again = recorded(replace(some_scenario(0), name="other"), 0)[0]
    assert again.step_times == results[0].step_times
