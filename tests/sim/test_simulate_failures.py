"""Engines and cells that die by plan: executions live on, work is redone, the run ends."""

from dataclasses import replace
from itertools import pairwise

import pytest

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.ids import EngineId, cell_engine_id, standalone_engine_id
from opengyre.simulate.result import Bucket, Mode, Result
from opengyre.simulate.scenario import Failure, Scenario
from opengyre.simulate.world import simulate
from tests.sim.simulate_scenarios import make_config, make_scenario, recorded, with_costs

SEED = 1
CALM = make_scenario()


def with_failures(*failures: Failure, scenario: Scenario = CALM) -> Scenario:
    return replace(scenario, failures=failures)


def stretch_of(result: Result, engine: EngineId, mode: Mode) -> tuple[float, float]:
    """The first one."""
    found = next(one for one in result.lanes if (one.engine, one.mode) == (engine, mode))
    return found.from_s, found.to_s


def check_books(result: Result) -> None:
    total_s = result.num_devices * result.wall_s
    assert sum(result.device_seconds.values()) == pytest.approx(total_s, rel=1e-9)
    assert sum(result.outcomes.values()) == result.num_dispatched
    assert result.aborted_s == 0.0


def test_the_executions_of_a_dead_engine_wait_for_slots_and_lose_no_work() -> None:
    engine = standalone_engine_id(0)
    result, rows = recorded(
        with_failures(Failure(at_s=1000.0, engine=engine, restart_after_s=500.0))
    )
    assert stretch_of(result, engine, Mode.LOST) == (1000.0, 1500.0)
    assert result.num_replaced > 0
    assert result.device_seconds[Bucket.LOST] == pytest.approx(500.0 * 2)
    lost = [now_s for now_s, value in rows if isinstance(value, f.EngineLost)]
    ready = [
        now_s for now_s, value in rows if isinstance(value, f.EngineReady) and value.incarnation > 1
    ]
    assert (lost, ready) == ([1000.0], [1500.0])
    check_books(result)


def test_a_full_run_that_loses_an_engine_holds_its_executions_until_it_is_back() -> None:
    scenario = make_scenario(config=make_config(num_cells=1, num_standalone=1, slots=18))
    engine = standalone_engine_id(0)
    dead = with_failures(
        Failure(at_s=1000.0, engine=engine, restart_after_s=900.0), scenario=scenario
    )
    calm, hit = simulate(scenario, SEED), simulate(dead, SEED)
    assert hit.stalled_s > calm.stalled_s + 900.0
    assert hit.num_replaced > calm.num_replaced == 0
    check_books(hit)


def test_the_work_of_a_satellite_that_dies_in_training_is_done_again() -> None:
    calm = simulate(CALM, SEED)
    satellite = cell_engine_id(1)
    from_s, to_s = stretch_of(calm, satellite, Mode.TRAINING)
    dies_s = to_s - 0.25 * (to_s - from_s)
    result, rows = recorded(
        with_failures(Failure(at_s=dies_s, engine=satellite, restart_after_s=60.0))
    )
    dropped = [
        command
        for _, value in rows
        for command in (value.commands if isinstance(value, c.Plan) else ())
        if isinstance(command, c.DropMember)
    ]
    assert [command.cell for command in dropped] == [1]
    assert 0 < result.redone_groups < 2
    assert result.num_steps == 6
    check_books(result)


def test_the_core_that_dies_in_training_redoes_the_burst_with_the_same_groups() -> None:
    calm = simulate(CALM, SEED)
    core = cell_engine_id(0)
    dies_s = calm.step_times[0] + 50.0
    result, rows = recorded(with_failures(Failure(at_s=dies_s, engine=core, restart_after_s=90.0)))
    committed = [value.step for _, value in rows if isinstance(value, f.StepCommitted)]
    assert committed == [1, 1, 2, 3, 4, 5, 6]
    assert result.step_times[0] > calm.step_times[0]
    assert sum(result.staleness.values()) == 24
    assert not result.failed
    check_books(result)


def test_a_satellite_that_never_comes_back_is_done_without() -> None:
    satellite = cell_engine_id(2)
    result = simulate(with_failures(Failure(at_s=500.0, engine=satellite)), SEED)
    assert stretch_of(result, satellite, Mode.LOST) == (500.0, result.wall_s)
    assert (result.num_steps, result.failed) == (6, False)
    check_books(result)


def test_a_core_that_never_comes_back_fails_the_run_with_a_reason() -> None:
    result = simulate(with_failures(Failure(at_s=500.0, engine=cell_engine_id(0))), SEED)
    assert result.failed
    assert "core" in result.reason
    check_books(result)


def test_an_engine_that_publishes_too_late_is_fenced_and_started_anew() -> None:
    scenario = with_costs(CALM, "publication", load_s=1000.0)
    result, rows = recorded(with_costs(scenario, "engine", restart_s=77.0))
    fenced = [
        (now_s, command.engine)
        for now_s, value in rows
        for command in (value.commands if isinstance(value, c.Plan) else ())
        if isinstance(command, c.Fence)
    ]
    assert fenced
    for at_s, engine in fenced:
        lost = [one for one in result.lanes if (one.engine, one.mode) == (engine, Mode.LOST)]
        assert any(
            one.from_s == at_s and one.to_s in (pytest.approx(at_s + 77.0), result.wall_s)
            for one in lost
        )
    check_books(result)


def test_a_dead_engine_does_not_die_again_and_times_of_death_are_in_order() -> None:
    engine = standalone_engine_id(0)
    twice = with_failures(
        Failure(at_s=1000.0, engine=engine, restart_after_s=500.0),
        Failure(at_s=1200.0, engine=engine, restart_after_s=1.0),
        Failure(at_s=2000.0, engine=engine, restart_after_s=10.0),
    )
    _, rows = recorded(twice)
    facts = [
        (now_s, type(value).__name__, value.incarnation)
        for now_s, value in rows
        if isinstance(value, f.EngineLost | f.EngineReady) and value.engine == engine
    ]
    assert facts == [
        (0.0, "EngineReady", 1),
        (1000.0, "EngineLost", 1),
        (1500.0, "EngineReady", 2),
        (2000.0, "EngineLost", 2),
        (2010.0, "EngineReady", 3),
    ]


def storm(seed: int) -> tuple[Failure, ...]:
    """Twelve deaths spread over a run of some hours, everywhere in turn."""
    engines = [spec.engine for spec in CALM.scheduler.engines]
    return tuple(
        Failure(
            at_s=900.0 + 1300.0 * number + 37.0 * seed,
            engine=engines[(number + seed) % len(engines)],
            restart_after_s=20.0 + 60.0 * ((number * seed) % 5),
        )
        for number in range(12)
    )


@pytest.mark.parametrize("seed", range(12))
def test_many_deaths_end_with_every_execution_closed_and_every_second_booked(seed: int) -> None:
    scenario = with_costs(with_failures(*storm(seed)), "switch", join_s=5.0, load_s=30.0)
    result, rows = recorded(scenario, seed)
    check_books(result)
    assert not result.failed, result.reason
    times = [now_s for now_s, _ in rows]
    assert all(before <= after for before, after in pairwise(times))
    assert recorded(scenario, seed)[1] == rows
