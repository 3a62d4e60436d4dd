"""Whole simulated runs: nothing is lost or counted twice; the same seed is the same run."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.config import PolicyName
from opengyre.control.errors import InvariantError
from opengyre.control.ids import cell_engine_id, standalone_engine_id
from opengyre.control.scheduler import Scheduler
from opengyre.seams.errors import ConfigError
from opengyre.simulate.result import Bucket, Mode, Result
from opengyre.simulate.scenario import Failure
from opengyre.simulate.workload import Draw, Endings, LognormalWorkload, Workload
from opengyre.simulate.world import simulate
from tests.sim.simulate_scenarios import HOUR_S, make_config, make_scenario, recorded, with_costs

SCENARIOS = {
    "calm": make_scenario(),
    "colocated": make_scenario(config=make_config(num_cells=1, num_standalone=0, slots=40)),
    "colocated with streaming and standalone engines": make_scenario(
        config=make_config(policy=PolicyName.COLOCATE)
    ),
    "colocated without streaming": make_scenario(
        config=make_config(policy=PolicyName.COLOCATE, is_streaming=False)
    ),
    "a fixed split": make_scenario(
        config=make_config(policy=PolicyName.ASYNC, num_training_cells=2)
    ),
    "a fixed split without streaming": make_scenario(
        config=make_config(policy=PolicyName.ASYNC, num_training_cells=1, is_streaming=False)
    ),
    "one step ahead": make_scenario(config=make_config(steps_per_burst=1, run_ahead=3)),
    "a queue": make_scenario(config=make_config(slots=5)),
    "void groups and caps": make_scenario(
        endings=Endings(
            harness_cap_s=1.5 * HOUR_S,
            overall_cap_s=1.2 * HOUR_S,
            no_verdict_rate=0.1,
            void_rate=0.2,
        )
    ),
    "evaluation": make_scenario(
        config=make_config(
            eval_every_bursts=1, num_eval_executions=4, eval_at_end=True, eval_deadline_s=HOUR_S
        )
    ),
    "slow everything": with_costs(
        with_costs(make_scenario(), "switch", enter_training_s=300.0, join_s=20.0, load_s=200.0),
        "engine",
        freeze_s=30.0,
        prefill_tokens_per_s=500.0,
        load_slope=0.7,
    ),
    "deaths": make_scenario(
        failures=(
            Failure(at_s=3000.0, engine=standalone_engine_id(0), restart_after_s=600.0),
            Failure(at_s=4200.0, engine=cell_engine_id(1), restart_after_s=60.0),
            Failure(at_s=9000.0, engine=cell_engine_id(0), restart_after_s=100.0),
            Failure(at_s=9050.0, engine=cell_engine_id(2), restart_after_s=None),
        )
    ),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Result, list[tuple[float, f.Fact | c.Plan]]]]:
    return {name: recorded(scenario) for name, scenario in SCENARIOS.items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_trains_every_step(name: str, runs) -> None:
    result, _ = runs[name]
    assert not result.failed, result.reason
    assert result.num_steps == 6
    assert 6 - result.num_empty <= len(result.step_times) <= 6
    assert list(result.step_times) == sorted(result.step_times)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_device_second_is_in_exactly_one_bucket(name: str, runs) -> None:
    result, _ = runs[name]
    assert list(result.device_seconds) == list(Bucket)
    assert min(result.device_seconds.values()) >= 0.0
    total_s = result.num_devices * result.wall_s
    assert sum(result.device_seconds.values()) == pytest.approx(total_s, rel=1e-9)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_dispatched_execution_gets_exactly_one_outcome(name: str, runs) -> None:
    result, rows = runs[name]
    dispatched, closed = [], []
    for _, value in rows:
        if isinstance(value, f.ExecutionClosed):
            closed.append(value.execution)
        for command in value.commands if isinstance(value, c.Plan) else ():
            if isinstance(command, c.DispatchGroups):
                dispatched.extend(one for _, members in command.groups for one in members)
            elif isinstance(command, c.DispatchEval):
                dispatched.extend(command.executions)
            elif isinstance(command, c.Cancel) and command.was_queued:
                closed.append(command.execution)
    assert sorted(closed) == sorted(dispatched)
    assert sum(result.outcomes.values()) == result.num_dispatched == len(dispatched)


@pytest.mark.parametrize("name", SCENARIOS)
def test_moves_publications_and_deaths_throw_no_work_away(name: str, runs) -> None:
    assert runs[name][0].aborted_s == 0.0


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_journal_gives_a_fresh_scheduler_the_same_plans(name: str, runs) -> None:
    scheduler, num_plans = Scheduler(SCENARIOS[name].scheduler), 0
    for now_s, value in runs[name][1]:
        if isinstance(value, c.Plan):
            assert scheduler.decide(now_s) == value
            num_plans += 1
        else:
            scheduler.observe(value, now_s)
    assert num_plans > 100


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_gives_the_same_result_and_the_same_journal(name: str, runs) -> None:
    result, rows = runs[name]
    again, rows_again = recorded(SCENARIOS[name])
    assert again == result
    assert _digest(rows_again) == _digest(rows)


def _digest(rows: list[tuple[float, f.Fact | c.Plan]]) -> str:
    return hashlib.sha256("\n".join(map(repr, rows)).encode()).hexdigest()


DIGEST_OF_DEATHS = (
    "from tests.sim.test_simulate_world import SCENARIOS, _digest, recorded;"
    "print(_digest(recorded(SCENARIOS['deaths'])[1]))"
)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_with_other_hashes_writes_the_same_journal(hash_seed: str, runs) -> None:
    command = [sys.executable, "-c", DIGEST_OF_DEATHS]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == _digest(runs["deaths"][1])


def test_another_seed_gives_another_run(runs) -> None:
    assert simulate(SCENARIOS["calm"], 2).wall_s != runs["calm"][0].wall_s


@pytest.mark.parametrize("name", SCENARIOS)
def test_lanes_cover_the_run_without_gap_or_overlap(name: str, runs) -> None:
    result, _ = runs[name]
    engines = [spec.engine for spec in SCENARIOS[name].scheduler.engines]
    assert list(dict.fromkeys(one.engine for one in result.lanes)) == engines
    for engine in engines:
        lane = [one for one in result.lanes if one.engine == engine]
        assert (lane[0].from_s, lane[-1].to_s) == (0.0, result.wall_s)
        for before, after in pairwise(lane):
            assert before.to_s == after.from_s
            assert before.mode is not after.mode
            assert before.from_s < before.to_s


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_consumed_group_is_older_than_the_bound(name: str, runs) -> None:
    result, _ = runs[name]
    bound = SCENARIOS[name].scheduler.staleness_bound
    assert set(result.staleness) <= set(range(bound + 1))
    num_missing = result.num_short + result.num_empty
    num_wanted = 6 * SCENARIOS[name].scheduler.groups_per_step
    assert sum(result.staleness.values()) == num_wanted or num_missing > 0


class Noted:
    """A workload that keeps what was drawn from it."""

    def __init__(self, inner: Workload) -> None:
        self._inner = inner
        self.mean_s = inner.mean_s
        self.drawn: dict[tuple[int, int], Draw] = {}

    def draw(self, seed: int, group: int, member: int) -> Draw:
        drawn = self._inner.draw(seed, group, member)
        assert self.drawn.setdefault((group, member), drawn) == drawn
        return drawn


def test_every_policy_and_layout_sees_the_same_trace() -> None:
    layouts: tuple[dict[str, Any], ...] = (
        {},
        {"policy": PolicyName.COLOCATE, "is_streaming": False},
        {"policy": PolicyName.ASYNC, "num_training_cells": 2},
        {"num_cells": 1, "num_standalone": 0, "slots": 40},
        {"steps_per_burst": 1, "run_ahead": 3, "slots": 5},
    )
    traces = []
    for numbers in layouts:
        noted = Noted(LognormalWorkload(mean_s=HOUR_S, sigma_between=0.3, sigma_within=0.4))
        simulate(replace(make_scenario(config=make_config(**numbers)), workload=noted), 3)
        traces.append(noted.drawn)
    assert all(trace == traces[0] for trace in traces)
    assert set(traces[0]) == {(group, member) for group in range(24) for member in range(3)}


def test_one_cell_trains_for_exactly_the_time_its_work_takes(runs) -> None:
    result, _ = runs["colocated"]
    work_s = 24 * 1000.0 + 6 * 10.0 * 4
    assert result.device_seconds[Bucket.TRAINING] == pytest.approx(work_s)
    assert result.num_moves == 0
    assert result.device_seconds[Bucket.LOST] == 0.0


def test_slots_in_use_are_the_hours_that_executions_worked(runs) -> None:
    noted = Noted(SCENARIOS["colocated"].workload)
    result = simulate(replace(SCENARIOS["colocated"], workload=noted), 1)
    worked_s = sum(one.duration_s for one in noted.drawn.values())
    generating_s = result.device_seconds[Bucket.GENERATING]
    assert generating_s * 40 / 4 == pytest.approx(worked_s + result.stalled_s, rel=0.02)


def test_caps_close_executions_as_timed_out_and_void_groups_are_counted(runs) -> None:
    result, rows = runs["void groups and caps"]
    closed = [value for _, value in rows if isinstance(value, f.ExecutionClosed)]
    timed_out = {one.execution for one in closed if one.outcome is f.Outcome.TIMED_OUT}
    assert len(timed_out) == result.outcomes[f.Outcome.TIMED_OUT] > 5
    verdicts = [value for _, value in rows if isinstance(value, f.VerdictGiven)]
    assert all(one.reward is None for one in verdicts if one.execution in timed_out)
    assert any(one.reward is not None for one in verdicts)
    assert result.num_void > 0


def test_evaluation_is_drawn_apart_and_ends(runs) -> None:
    result, rows = runs["evaluation"]
    plain, _ = runs["calm"]
    assert result.num_dispatched == plain.num_dispatched + 4 * 3
    verdicts = [value.execution for _, value in rows if isinstance(value, f.VerdictGiven)]
    assert len(set(verdicts)) == len(verdicts) == result.num_dispatched


def test_a_run_may_end_after_the_first_steps_of_a_longer_one() -> None:
    longer = make_scenario(config=make_config(num_steps=20))
    whole = simulate(longer, 1)
    first = simulate(replace(longer, stop_after_step=6), 1)
    assert first.step_times == whole.step_times[:6]
    assert first.wall_s == first.step_times[-1]
    assert first.outcomes[f.Outcome.CANCELLED] > 0 < first.cancelled_s
    assert sum(first.device_seconds.values()) == pytest.approx(first.num_devices * first.wall_s)
    assert first.device_seconds[Bucket.IDLE_AT_END] == 0.0
    assert not first.failed


def test_free_slots_wait_for_coverage_for_supply_or_for_data() -> None:
    waits = (Bucket.WAITING_FOR_COVERAGE, Bucket.WAITING_FOR_SUPPLY, Bucket.WAITING_FOR_DATA)
    whole = make_config(num_cells=1, num_standalone=0, slots=40, run_ahead=0)
    pinned = simulate(make_scenario(config=whole), 1)
    assert pinned.device_seconds[waits[0]] > 0.2 * pinned.num_devices * pinned.wall_s
    roomy = simulate(make_scenario(config=make_config(slots=60, supply_fraction=0.5)), 1)
    assert roomy.device_seconds[waits[1]] > roomy.device_seconds[waits[0]] == 0.0
    rich = simulate(make_scenario(config=make_config(slots=60, supply_hold_s=0.0)), 1)
    assert rich.slack > 0.2
    assert rich.device_seconds[waits[2]] > roomy.device_seconds[waits[2]]


def test_cells_of_a_fixed_split_never_change_and_their_free_slots_wait_for_data(runs) -> None:
    result, _ = runs["a fixed split"]
    modes = {one.engine: set() for one in result.lanes}
    for one in result.lanes:
        modes[one.engine].add(one.mode)
    assert Mode.ROLLOUT not in modes["c0"] | modes["c1"]
    assert Mode.TRAINING not in modes["c2"] | modes["s0"]
    assert result.device_seconds[Bucket.WAITING_FOR_COVERAGE] == 0.0
    assert result.device_seconds[Bucket.WAITING_FOR_SUPPLY] == 0.0
    assert result.num_moves == 0


def test_colocated_cells_leave_together_and_their_free_slots_wait_for_coverage(runs) -> None:
    result, _ = runs["colocated with streaming and standalone engines"]
    starts: dict[float, set[str]] = {}
    for one in result.lanes:
        if one.mode is Mode.TRAINING:
            starts.setdefault(one.from_s, set()).add(one.engine)
    assert starts
    assert all(engines == {"c0", "c1", "c2"} for engines in starts.values())
    elastic, _ = runs["calm"]
    waits = Bucket.WAITING_FOR_COVERAGE
    assert result.device_seconds[waits] > 3 * elastic.device_seconds[waits]


def test_a_run_that_never_ends_is_an_error_with_its_name() -> None:
    with pytest.raises(ConfigError, match="small: no end after 100"):
        simulate(replace(make_scenario(), max_s=100.0), 1)


def test_a_scenario_out_of_bounds_is_refused() -> None:
    scenario = make_scenario()
    wrong: tuple[dict[str, Any], ...] = (
        {"failures": (Failure(at_s=1.0, engine=cell_engine_id(7)),)},
        {"devices_per_cell": 0},
        {"stop_after_step": 0},
    )
    for numbers in wrong:
        with pytest.raises(InvariantError):
            replace(scenario, **numbers)


def test_the_books_know_every_mode(runs) -> None:
    seen = {one.mode for result, _ in runs.values() for one in result.lanes}
    assert seen == set(Mode)
