"""Small simulated runs for tests: three cells, one standalone engine, hour-long executions."""

from dataclasses import replace
from typing import Any

from opengyre.control.commands import Plan
from opengyre.control.config import EngineSpec, SchedulerConfig
from opengyre.control.facts import Fact
from opengyre.control.ids import cell_engine_id, standalone_engine_id
from opengyre.simulate.costs import Costs, TrainingCosts
from opengyre.simulate.result import Result
from opengyre.simulate.scenario import Failure, Scenario
from opengyre.simulate.workload import Endings, LognormalWorkload
from opengyre.simulate.world import simulate

HOUR_S = 3600.0
SMALL_COSTS = Costs(training=TrainingCosts(group_device_s=1000.0))


def make_config(
    *, num_cells: int = 3, num_standalone: int = 1, slots: int = 12, **numbers: Any
) -> SchedulerConfig:
    cells = tuple(
        EngineSpec(engine=cell_engine_id(k), slots=slots, cell=k) for k in range(num_cells)
    )
    standalone = tuple(
        EngineSpec(engine=standalone_engine_id(k), slots=slots, cell=None)
        for k in range(num_standalone)
    )
    defaults: dict[str, Any] = {
        "num_steps": 6,
        "group_size": 3,
        "groups_per_step": 4,
        "supply_fraction": 0.25,
        "supply_hold_s": 5.0,
        "is_strict": True,
    }
    return SchedulerConfig(
        num_cells=num_cells, engines=cells + standalone, **{**defaults, **numbers}
    )


def make_scenario(
    *,
    config: SchedulerConfig | None = None,
    costs: Costs = SMALL_COSTS,
    endings: Endings | None = None,
    failures: tuple[Failure, ...] = (),
) -> Scenario:
    return Scenario(
        name="small",
        scheduler=config or make_config(),
        devices_per_cell=4,
        devices_per_standalone=2,
        costs=costs,
        workload=LognormalWorkload(
            mean_s=HOUR_S, sigma_between=0.3, sigma_within=0.4, endings=endings or Endings()
        ),
        failures=failures,
        max_s=1e7,
    )


def recorded(scenario: Scenario, seed: int = 1) -> tuple[Result, list[tuple[float, Fact | Plan]]]:
    """The result and the journal."""
    rows: list[tuple[float, Fact | Plan]] = []
    result = simulate(scenario, seed, journal=lambda now_s, value: rows.append((now_s, value)))
    return result, rows


def with_costs(scenario: Scenario, part: str, **numbers: Any) -> Scenario:
    """The scenario with other numbers in one part of its costs."""
    costs = scenario.costs
    changed = replace(getattr(costs, part), **numbers)
    return replace(scenario, costs=replace(costs, **{part: changed}))
