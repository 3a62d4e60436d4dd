"""The planner: which layouts it tries, how it judges them, what it says."""

import pytest

from opengyre.config.simulation import SimulationConfig
from opengyre.seams.errors import ConfigError
from opengyre.simulate.compare import Bench
from opengyre.simulate.plan import Gain, Plan, Trials, Tried, gain, plan, verdict
from opengyre.simulate.plan_layout import Layout, Space, configured, slowdown
from opengyre.simulate.plan_region import region
from opengyre.simulate.plan_workload import (
    at_share,
    capped_share,
    durations,
    lengthened,
    piled,
    training_share,
)
from opengyre.simulate.repeat import Repeater
from opengyre.simulate.workload import (
    EmpiricalWorkload,
    Endings,
    LognormalWorkload,
    Recorded,
)

SPACE = Space(num_devices=16, cell_devices=(2, 4), slots=(2.0, 4.0), max_staleness=3)
TINY = SimulationConfig.model_validate(
    {
        "scenario": {"name": "tiny", "num_steps": 2, "num_seeds": 2},
        "topology": {"num_cells": 4, "devices_per_cell": 1, "slots_per_device": 4.0},
        "schedule": {"group_size": 2, "groups_per_step": 2, "supply_fraction": 0.5},
        "costs": {"training": {"group_device_s": 100.0}},
        "workload": {"mean_s": 300.0, "sigma_within": 0.4},
    }
)


def layout_of(policy: str, **changes: object) -> Layout:
    fields = {
        "policy": policy,
        "num_cells": 4,
        "devices_per_cell": 4,
        "num_standalone": 0,
        "devices_per_standalone": 2,
        "slots_per_device": 4.0,
        "steps_per_burst": 3,
        "run_ahead": 1,
    }
    return Layout(**(fields | changes))  # type: ignore[arg-type]  # a row of fields


def tried(policy: str, *rates: float) -> Tried:
    return Tried(layout=layout_of(policy), groups_per_hour=rates, num_devices=16)


def plan_of(*best: Tried) -> Plan:
    ranked = tuple(sorted(best, key=lambda one: -one.mean))
    return Plan(best=ranked, num_tried=3, num_runs=6, is_cut_short=False)


def trials_of(*, max_layouts: int = 12, num_devices: int = 4) -> Trials:
    space = Space(num_devices=num_devices, cell_devices=(1,), slots=(4.0,), max_staleness=1)
    bench = Bench(repeater=Repeater(1), num_seeds=2)
    return Trials(config=TINY, space=space, bench=bench, max_layouts=max_layouts)


def test_every_layout_of_a_grid_keeps_the_budget_and_the_staleness_bound() -> None:
    for policy in ("elastic", "async", "colocate"):
        grid = SPACE.grid(policy, 0.5)
        assert len(grid) == len(set(grid)) > 6
        for one in grid:
            assert one.num_devices == 16
            assert one.steps_per_burst + one.run_ahead - 1 <= 3


def test_neighbours_differ_in_one_respect_and_stay_in_the_space() -> None:
    middle = layout_of("elastic", num_cells=3, num_standalone=2)
    beside = SPACE.neighbours(middle)
    assert middle not in beside
    assert layout_of("elastic", num_cells=4) in beside
    assert layout_of("elastic", num_cells=2, num_standalone=4) in beside
    assert layout_of("elastic", num_cells=3, num_standalone=2, slots_per_device=2.0) in beside
    assert layout_of("elastic", num_cells=6, devices_per_cell=2, num_standalone=2) in beside
    assert all(one.steps_per_burst + one.run_ahead - 1 <= 3 for one in beside)
    assert all(one.num_devices == 16 for one in beside)


def test_static_splits_begin_near_the_balanced_one_and_leave_something_to_roll_out() -> None:
    assert SPACE.splits(0.5) == [3, 4, 5, 6]
    assert SPACE.splits(0.01) == [1, 2]
    assert SPACE.splits(0.99) == [6, 7]
    most = layout_of("async", num_cells=1, devices_per_cell=14, num_standalone=1)
    assert {one.devices_per_cell for one in SPACE.neighbours(most)} == {12, 14}


def test_a_budget_below_one_cell_is_refused() -> None:
    with pytest.raises(ConfigError, match="device budget 3: expected at least 4"):
        Space(num_devices=3, cell_devices=(4,), slots=(1.0,), max_staleness=0)


def test_a_static_split_is_configured_as_one_cell_that_always_trains() -> None:
    split = layout_of("async", num_cells=1, devices_per_cell=6, num_standalone=5)
    config = configured(TINY, split, max_staleness=3)
    assert config.schedule.num_training_cells == 1
    assert config.topology.num_devices == 16
    assert config.schedule.max_staleness == 3


def test_fewer_slots_are_quicker_by_the_load_curve_except_for_the_time_in_tools() -> None:
    engine = TINY.costs.engine.model_copy(update={"load_slope": 1.0})
    tools = TINY.costs.tools.model_copy(update={"share": 0.5})
    costs = TINY.costs.model_copy(update={"engine": engine, "tools": tools})
    steep = TINY.model_copy(update={"costs": costs})
    assert slowdown(steep, 4.0) == 1.0
    assert slowdown(steep, 2.0) == pytest.approx(0.5 + 0.5 * 1.5 / 2.0)
    half = configured(steep, layout_of("elastic", slots_per_device=2.0), max_staleness=3)
    assert half.costs.engine.load_slope == pytest.approx(0.5)


def test_a_search_is_the_same_each_time_and_within_its_bound() -> None:
    first, second = trials_of(), trials_of()
    best = plan(first)
    assert best == plan(second)
    assert best.num_tried <= 12
    assert best.num_runs == first.num_runs > best.num_tried
    assert {one.layout.policy for one in best.best} == {"elastic", "async", "colocate"}
    assert [one.mean for one in best.best] == sorted((o.mean for o in best.best), reverse=True)
    assert all(len(one.groups_per_hour) == 2 for one in best.best)


def test_a_search_that_reaches_its_bound_says_so_and_tries_every_policy() -> None:
    best = plan(trials_of(max_layouts=6))
    assert best.is_cut_short
    assert len(best.best) == 3


def test_a_budget_of_one_cell_can_only_colocate() -> None:
    best = plan(trials_of(num_devices=1))
    assert [one.layout.policy for one in best.best] == ["colocate"]
    assert verdict(best).startswith("elasticity is not possible here")
    assert region(trials_of(num_devices=1), best) is None


def test_a_gain_is_paired_by_seed() -> None:
    over = gain(tried("elastic", 11.0, 22.0), tried("async", 10.0, 20.0))
    assert over.share == pytest.approx(0.1)
    assert over.error == pytest.approx(0.0, abs=1e-12)
    assert not Gain(share=0.05, error=0.03).is_clear
    assert not Gain(share=0.005, error=0.0).is_clear


def test_the_verdict_is_honest_when_elasticity_loses() -> None:
    words = verdict(plan_of(tried("elastic", 10.0, 10.0), tried("async", 10.3, 10.3)))
    assert words == "elasticity does not pay here: the best static split is 3.0% quicker"


def test_the_verdict_names_colocate_when_it_beats_elastic() -> None:
    best = plan_of(
        tried("elastic", 11.0, 11.0), tried("async", 10.0, 10.0), tried("colocate", 12.0, 12.0)
    )
    assert "pays here: +10.0%" in verdict(best)
    assert "but colocate is 9.1% quicker than elastic" in verdict(best)


def test_the_verdict_says_when_colocate_does_as_well() -> None:
    best = plan_of(
        tried("elastic", 11.0, 11.0), tried("async", 10.0, 10.0), tried("colocate", 10.9, 11.15)
    )
    assert "but colocate does as well, +0.2%" in verdict(best)


def test_one_seed_makes_no_clear_difference() -> None:
    best = plan_of(tried("elastic", 12.0), tried("async", 10.0))
    assert verdict(best).startswith("elasticity makes no clear difference here: +20.0% (one seed)")


def test_the_verdict_calls_a_difference_within_chance_no_difference() -> None:
    best = plan_of(tried("elastic", 9.0, 11.5), tried("async", 10.0, 10.0))
    assert verdict(best).startswith("elasticity makes no clear difference here: +2.5%")


def test_a_pile_at_the_time_out_has_the_share_asked_for_and_is_graded() -> None:
    free = LognormalWorkload(
        mean_s=100.0, sigma_within=0.5, endings=Endings(overall_cap_s=120.0, void_rate=0.1)
    )
    workload = piled(free, 0.3)
    assert capped_share(workload) == pytest.approx(0.3, abs=0.01)
    assert capped_share(piled(free, 0.0)) == 0.0
    assert isinstance(workload, LognormalWorkload)
    assert workload.endings.void_rate == 0.1
    assert workload.endings.overall_cap_s is None


def test_a_longer_workload_is_longer_before_its_caps() -> None:
    recorded = EmpiricalWorkload(
        groups=((Recorded(duration_s=10.0), Recorded(duration_s=30.0)),),
        endings=Endings(harness_cap_s=40.0),
    )
    assert sorted(set(durations(lengthened(recorded, 2.0)))) == [20.0, 40.0]
    assert lengthened(recorded, 1.0) is recorded


def test_the_training_share_is_that_of_the_device_seconds() -> None:
    steady = LognormalWorkload(mean_s=200.0)
    assert training_share(TINY, steady) == pytest.approx(0.5)
    dear = at_share(TINY, steady, 0.9)
    assert dear.costs.training.group_device_s == pytest.approx(900.0)
    assert training_share(dear, steady) == pytest.approx(0.9)
