"""What an event of a simulated run costs does not grow with cells or with what is over.

Work is counted in calls of Python functions, not in seconds, so that a busy machine changes
nothing. The absolute figures are in benchmarks/README.md.
"""

import sys
from pathlib import Path
from types import FrameType

import pytest

from opengyre.config.load_simulation import load_simulation
from opengyre.simulate.from_config import scenario_of
from opengyre.simulate.result import Result
from opengyre.simulate.world import simulate

E0 = Path(__file__).resolve().parents[2] / "examples" / "paper" / "E0.toml"


def counted(*overrides: str) -> tuple[int, Result]:
    """(Python calls, result) of one run of E0 with `overrides`."""
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    scenario = scenario_of(load_simulation(E0, overrides))
    sys.setprofile(count)
    try:
        result = simulate(scenario, seed=1)
    finally:
        sys.setprofile(None)
    return num_calls, result


def calls_per_event(num_calls: int, result: Result) -> float:
    return num_calls / result.num_events


def test_sixteen_times_the_cells_do_not_make_an_event_dearer() -> None:
    steps = ("scenario.num_steps=6", "scenario.stop_after_step=6")
    few = counted("topology.num_cells=8", *steps)
    many = counted("topology.num_cells=128", "topology.slots_per_device=1.25", *steps)
    assert calls_per_event(*many) < 1.5 * calls_per_event(*few)


def test_eight_times_the_steps_do_not_make_an_event_dearer() -> None:
    short = counted("scenario.num_steps=6", "scenario.stop_after_step=6")
    long = counted("scenario.num_steps=48", "scenario.stop_after_step=48")
    assert calls_per_event(*long) < 1.2 * calls_per_event(*short)


def test_the_events_of_a_run_are_in_proportion_to_its_executions() -> None:
    steps = ("scenario.num_steps=6", "scenario.stop_after_step=6")
    _, small = counted("schedule.groups_per_step=16", *steps)
    _, large = counted("schedule.groups_per_step=64", "topology.num_cells=32", *steps)
    per_execution = [one.num_events / sum(one.outcomes.values()) for one in (small, large)]
    assert per_execution[1] == pytest.approx(per_execution[0], rel=0.25)
    assert max(per_execution) < 8.0
