"""Seeded runs of the whole scheduler: every promise after every event, and an end always."""

from dataclasses import replace

import pytest

from opengyre.control import commands as c
from opengyre.control.config import EngineSpec, Overdue, SchedulerConfig
from opengyre.control.ids import cell_engine_id, standalone_engine_id
from opengyre.control.scheduler import Scheduler
from tests.sim.control_world import Weather, World


def make_config(*, num_cells: int = 3, num_standalone: int = 1, slots: int = 12, **numbers):
    cells = tuple(
        EngineSpec(engine=cell_engine_id(k), slots=slots, cell=k) for k in range(num_cells)
    )
    standalone = tuple(
        EngineSpec(engine=standalone_engine_id(k), slots=slots, cell=None)
        for k in range(num_standalone)
    )
    defaults = {
        "num_steps": 6,
        "group_size": 3,
        "groups_per_step": 4,
        "supply_fraction": 0.25,
        "supply_hold_s": 0.5,
        "is_strict": True,
    }
    return SchedulerConfig(
        num_cells=num_cells, engines=cells + standalone, **{**defaults, **numbers}
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_calm_run_trains_every_step_and_ends(seed: int) -> None:
    world = World(make_config(), Weather(seed=seed, no_verdict_rate=0.0))
    end = world.run()
    assert not end.failed
    assert world.scheduler.snapshot().steps_done == 6
    assert world.scheduler.snapshot().num_consumed == 24
    assert world.counts["EnterTraining"] >= 1


STORMS = {
    "void groups and doubled facts": Weather(void_rate=0.9, doubled_rate=0.2),
    "commands fail": Weather(fail_rate=0.03),
    "engines die and come back": Weather(deaths=6),
    "engines die and some stay away": Weather(deaths=5, never_restarts_rate=0.4),
    "publications are slow": Weather(slow_publish_rate=0.3),
    "steps without trainable tokens": Weather(untrainable_rate=0.4),
    "groups without variance": Weather(flat_rate=0.4, excluded_rate=0.1),
    "everything at once": Weather(
        void_rate=0.7,
        doubled_rate=0.1,
        fail_rate=0.02,
        deaths=6,
        never_restarts_rate=0.2,
        slow_publish_rate=0.2,
        untrainable_rate=0.2,
        flat_rate=0.3,
        excluded_rate=0.1,
    ),
}


SIEVES = (
    {"filter_zero_variance": True, "oversample": 1.5},
    {},
    {"filter_zero_variance": True, "oversample": 2.25},
    {"oversample": 1.1},
)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", STORMS)
def test_a_storm_breaks_no_promise_and_the_run_ends(name: str, seed: int) -> None:
    shape = {
        "num_cells": 1 + seed % 4,
        "num_standalone": seed % 3,
        "run_ahead": seed % 3,
        "steps_per_burst": 1 + seed % 3,
        "num_eval_executions": 5,
        "eval_at_start": True,
        "eval_at_end": True,
        "eval_every_bursts": 2,
        "eval_deadline_s": 60.0,
        "recall_after_s": 20.0,
        "lost_deadline_s": 300.0,
        "max_core_losses": 50,
        **SIEVES[seed % len(SIEVES)],
    }
    world = World(make_config(**shape), replace(STORMS[name], seed=seed))
    world.run()
    assert world.scheduler.snapshot().waterlevel == 0 or world.end.failed


def test_the_journal_replayed_gives_the_same_plans() -> None:
    config = make_config(num_eval_executions=4, eval_at_end=True, recall_after_s=20.0)
    world = World(config, replace(STORMS["everything at once"], seed=5))
    world.run()
    again = Scheduler(config)
    num_plans = 0
    for now_s, entry in world.journal:
        if isinstance(entry, c.Plan):
            assert again.decide(now_s) == entry
            num_plans += 1
        else:
            again.observe(entry, now_s)
    assert num_plans > 100


def test_the_same_seed_gives_the_same_journal() -> None:
    weather = replace(STORMS["everything at once"], seed=11)
    first, second = World(make_config(), weather), World(make_config(), weather)
    first.run()
    second.run()
    assert first.journal == second.journal


@pytest.mark.parametrize("overdue", list(Overdue))
@pytest.mark.parametrize("seed", range(6))
def test_no_trained_group_is_older_than_the_bound_when_some_take_very_long(
    seed: int, overdue: Overdue
) -> None:
    """The world asserts the age of each consumed group; strict bound, long tails."""
    config = make_config(
        num_steps=10, run_ahead=2, steps_per_burst=2, max_staleness=3, overdue=overdue, slots=16
    )
    world = World(config, Weather(seed=seed, execution_s=30.0, straggler_rate=0.08))
    end = world.run()
    view = world.scheduler.snapshot()
    assert not end.failed
    assert view.steps_done == 10
    if overdue is Overdue.WAIT:
        assert view.num_dropped == 0


def test_long_outages_recall_satellites_and_the_core_and_every_step_is_still_trained() -> None:
    recalled: set[str] = set()
    for seed in range(12):
        config = make_config(
            num_cells=3,
            num_standalone=1 + seed % 2,
            slots=6,
            num_steps=8,
            recall_after_s=5.0,
            lost_deadline_s=2000.0,
            max_core_losses=50,
        )
        world = World(
            config,
            Weather(seed=seed, deaths=14, restart_s=60.0, execution_s=30.0, group_work_s=20.0),
        )
        assert not world.run().failed
        assert world.scheduler.snapshot().steps_done == 8
        plans = [entry for _, entry in world.journal if isinstance(entry, c.Plan)]
        for command in (one for plan in plans for one in plan.commands):
            if "is recalled" in command.reason:
                recalled.add(type(command).__name__)
    assert recalled == {"AbandonStep", "DropMember", "Checkpoint"}


@pytest.mark.parametrize("seed", range(6))
def test_filtered_groups_are_counted_from_the_verdicts_and_never_trained(seed: int) -> None:
    sieve = {"filter_zero_variance": True, "oversample": 2.0, "slots": 24}
    world = World(make_config(**sieve), Weather(seed=seed, flat_rate=0.4, excluded_rate=0.1))
    assert not world.run().failed
    view = world.scheduler.snapshot()
    assert view.num_filtered == sum(map(world.is_flat, world.members_by_group)) > 0
    assert view.steps_done == 6
    consumed = {group for groups in world.consumed.values() for group in groups}
    assert not any(map(world.is_flat, consumed))


@pytest.mark.parametrize("oversample", [1.3, 2.0, 3.5])
@pytest.mark.parametrize("seed", range(4))
def test_the_least_bound_is_kept_when_nothing_is_filtered_and_groups_pile_up(
    seed: int, oversample: float
) -> None:
    """The world asserts the age of each consumed group; none is dropped, some reach the bound."""
    config = make_config(num_steps=12, run_ahead=1, oversample=oversample, slots=40)
    config = replace(config, max_staleness=config.least_staleness)
    world = World(config, Weather(seed=seed, straggler_rate=0.05, no_verdict_rate=0.0))
    assert not world.run().failed
    view = world.scheduler.snapshot()
    assert (view.steps_done, view.num_short_steps, view.num_dropped) == (12, 0, 0)
    assert view.num_consumed == 48
    oldest = max(
        step - 1 - world.version_by_group[group]
        for step, groups in world.consumed.items()
        for group in groups
    )
    assert oldest == config.least_staleness


def test_surplus_groups_at_the_end_are_no_sign_of_trouble() -> None:
    """More of them are cut off than void groups in a row would stop the run."""
    config = make_config(oversample=4.0, num_steps=2, max_void_in_a_row=3, slots=20)
    world = World(config, Weather(seed=1, no_verdict_rate=0.0))
    assert not world.run().failed
    view = world.scheduler.snapshot()
    assert (view.steps_done, view.num_consumed) == (2, 8)
    surplus = view.num_ready + view.num_void + view.num_live
    assert surplus == len(world.members_by_group) - 8
    assert view.num_void > 3
