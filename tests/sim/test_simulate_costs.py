"""Every number of the cost models changes what it says it changes."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from opengyre.control import facts as f
from opengyre.simulate.costs import Costs, TrainingCosts, group_device_s
from opengyre.simulate.result import Bucket, Mode, Result
from opengyre.simulate.scenario import Scenario
from opengyre.simulate.world import simulate
from tests.sim.simulate_scenarios import HOUR_S, make_config, make_scenario, recorded, with_costs

SEED = 1


@dataclass(frozen=True, kw_only=True)
class Knob:
    """`name` of `part` set to `value` makes `measure` rise; `base` sets the scene."""

    part: str
    name: str
    value: Any
    measure: Callable[[Result], float]
    base: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.part}.{self.name}"

    def scenario(self) -> Scenario:
        scenario = make_scenario(config=make_config(**self.config))
        for part, numbers in self.base.items():
            scenario = with_costs(scenario, part, **numbers)
        return scenario


def bucket(name: Bucket) -> Callable[[Result], float]:
    return lambda result: result.device_seconds[name]


def less(measure: Callable[[Result], float]) -> Callable[[Result], float]:
    return lambda result: -measure(result)


def stalled_s(result: Result) -> float:
    return result.stalled_s


def recomputed(result: Result) -> float:
    return result.recomputed_tokens


def first_step_s(result: Result) -> float:
    return result.step_times[0]


def lost_s(result: Result) -> float:
    return sum(one.to_s - one.from_s for one in result.lanes if one.mode is Mode.LOST)


ONE_CELL = {"num_cells": 1, "num_standalone": 0, "slots": 40}
SLOW_DOORS = {"publication": {"load_s": 100.0}}
LATE_DOORS = {"publication": {"load_s": 400.0}}
SLOW_GRADERS = {"grader": {"grade_s": 900.0}}
TRAINING, MOVING = bucket(Bucket.TRAINING), bucket(Bucket.MOVING)
PUBLISHING = bucket(Bucket.PUBLISHING)

KNOBS = (
    Knob(part="engine", name="load_slope", value=1.0, measure=less(first_step_s)),
    Knob(part="engine", name="prefill_tokens_per_s", value=500.0, measure=stalled_s),
    Knob(part="engine", name="kv_move_tokens_per_s", value=500.0, measure=stalled_s),
    Knob(part="engine", name="has_kv_handoff", value=False, measure=recomputed),
    Knob(part="engine", name="freeze_s", value=50.0, measure=MOVING),
    Knob(part="engine", name="restart_s", value=900.0, measure=lost_s, base=LATE_DOORS),
    Knob(part="training", name="group_device_s", value=2000.0, measure=TRAINING, config=ONE_CELL),
    Knob(part="training", name="efficiency", value=0.5, measure=TRAINING),
    Knob(part="training", name="bubble_s", value=60.0, measure=TRAINING, config=ONE_CELL),
    Knob(part="training", name="open_s", value=60.0, measure=PUBLISHING),
    Knob(part="training", name="reduce_s", value=60.0, measure=TRAINING),
    Knob(part="training", name="optimizer_s", value=60.0, measure=TRAINING, config=ONE_CELL),
    Knob(
        part="training",
        name="is_by_length",
        value=True,
        measure=lambda result: abs(TRAINING(result) - 24_240.0),
        config=ONE_CELL,
    ),
    Knob(part="switch", name="enter_training_s", value=60.0, measure=MOVING),
    Knob(part="switch", name="leave_training_s", value=60.0, measure=MOVING),
    Knob(part="switch", name="join_s", value=20.0, measure=MOVING),
    Knob(part="switch", name="load_s", value=60.0, measure=MOVING),
    Knob(part="publication", name="expose_s", value=60.0, measure=PUBLISHING),
    Knob(part="publication", name="load_s", value=60.0, measure=PUBLISHING),
    Knob(part="checkpoint", name="save_s", value=60.0, measure=PUBLISHING),
    Knob(part="grader", name="grade_s", value=900.0, measure=first_step_s),
    Knob(part="grader", name="num_graders", value=1, measure=first_step_s, base=SLOW_GRADERS),
    Knob(part="grader", name="fail_rate", value=0.6, measure=lambda result: result.num_void),
    Knob(part="tools", name="share", value=0.9, measure=less(stalled_s), base=SLOW_DOORS),
    Knob(part="tools", name="call_s", value=2000.0, measure=less(stalled_s), base=SLOW_DOORS),
    Knob(part="tools", name="start_tokens", value=50_000, measure=recomputed),
    Knob(part="tools", name="tokens_per_s", value=40.0, measure=recomputed),
    Knob(part="tools", name="max_tokens", value=20_000, measure=less(recomputed)),
)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.label)
def test_a_number_changes_what_it_says(knob: Knob) -> None:
    scenario = knob.scenario()
    before = knob.measure(simulate(scenario, SEED))
    changed = with_costs(scenario, knob.part, **{knob.name: knob.value})
    assert knob.measure(simulate(changed, SEED)) > before + 1e-6


def test_no_number_is_without_such_a_test() -> None:
    costs = Costs(training=TrainingCosts(group_device_s=1.0))
    named = {
        f"{part.name}.{one.name}"
        for part in fields(costs)
        for one in fields(getattr(costs, part.name))
    }
    assert {knob.label for knob in KNOBS} == named


def test_a_role_change_costs_its_seconds_times_the_cell_s_devices() -> None:
    result = simulate(make_scenario(config=make_config(**ONE_CELL)), SEED)
    num_back = result.num_switches - 1
    assert result.num_switches == 3
    moving_s = 4 * (result.num_switches * 8.52 + num_back * 3.46)
    assert result.device_seconds[Bucket.MOVING] == pytest.approx(moving_s)


def test_the_core_has_its_own_weights_and_loads_none() -> None:
    plain = make_scenario(config=make_config(**ONE_CELL))
    slow = with_costs(plain, "switch", load_s=500.0, join_s=500.0)
    assert simulate(slow, SEED) == simulate(plain, SEED)


def test_without_handoff_every_moved_request_is_recomputed_and_with_it_blocks_are_read() -> None:
    scenario = with_costs(make_scenario(), "tools", share=0.0)
    handed = simulate(scenario, SEED)
    assert handed.num_moves > 5
    assert handed.kv_moved_tokens > 0
    dropped = simulate(with_costs(scenario, "engine", has_kv_handoff=False), SEED)
    assert dropped.kv_moved_tokens == 0
    assert dropped.recomputed_tokens > handed.recomputed_tokens


def test_a_tool_call_goes_on_while_the_door_is_shut() -> None:
    scenario = with_costs(make_scenario(), "publication", load_s=100.0)
    scenario = with_costs(scenario, "tools", start_tokens=0, tokens_per_s=0.0, call_s=1e9)
    held = simulate(with_costs(scenario, "tools", share=0.0), SEED)
    in_tools = simulate(with_costs(scenario, "tools", share=1.0), SEED)
    assert held.stalled_s >= 1000.0
    assert in_tools.stalled_s == 0.0


def test_a_held_request_loses_the_time_of_the_publication_and_no_work() -> None:
    """No cell leaves while a door is shut, so that each is held for the whole of it."""
    scenario = make_scenario(config=make_config(supply_hold_s=200.0))
    scenario = with_costs(scenario, "publication", load_s=100.0)
    scenario = with_costs(scenario, "tools", start_tokens=0, tokens_per_s=0.0, share=0.0)
    result, rows = recorded(with_costs(scenario, "engine", kv_move_tokens_per_s=1e12))
    num_held = round(result.stalled_s / 100.0)
    assert num_held > 0
    assert result.stalled_s == pytest.approx(100.0 * num_held)
    assert result.aborted_s == 0.0
    assert sum(isinstance(value, f.ExecutionClosed) for _, value in rows) == 72


def test_work_by_length_keeps_the_total_of_mean_groups_near_the_plain_one() -> None:
    plain = make_scenario(config=make_config(**ONE_CELL, num_steps=40))
    by_length = with_costs(plain, "training", is_by_length=True)
    ratio = TRAINING(simulate(by_length, SEED)) / TRAINING(simulate(plain, SEED))
    assert ratio == pytest.approx(1.0, abs=0.1)
    assert ratio != 1.0


def test_the_time_of_an_update_on_a_pool_gives_the_work_of_a_group() -> None:
    work_s = group_device_s(update_s=600.0, num_devices=32, num_groups=16)
    costs = TrainingCosts(group_device_s=work_s)
    assert 16 / costs.groups_per_s(32, is_core=True) == pytest.approx(600.0)
    assert costs.groups_per_s(32, is_core=False) == 0.95 * costs.groups_per_s(32, is_core=True)


def test_a_load_curve_shortens_runs_whose_engines_are_half_empty() -> None:
    scenario = make_scenario(config=make_config(slots=24))
    flat = simulate(scenario, SEED)
    curved = simulate(with_costs(scenario, "engine", load_slope=0.7), SEED)
    assert curved.wall_s < 0.9 * flat.wall_s
    assert curved.aborted_s == 0.0


def test_graders_are_a_queue_when_they_are_few() -> None:
    scenario = with_costs(make_scenario(), "grader", grade_s=600.0)
    many = simulate(scenario, SEED)
    few = simulate(with_costs(scenario, "grader", num_graders=2), SEED)
    one = simulate(with_costs(scenario, "grader", num_graders=1), SEED)
    assert many.wall_s < few.wall_s < one.wall_s
    assert one.wall_s >= 71 * 600.0
    plain = replace(make_scenario(), name="plain")
    assert simulate(plain, SEED).wall_s < many.wall_s < simulate(plain, SEED).wall_s + 3 * HOUR_S
