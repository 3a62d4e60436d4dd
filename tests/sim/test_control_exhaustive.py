"""Every order of events in small worlds: no promise broken, and an end within reach of all.

Each shape is searched whole, two at a time; its counts are printed. Lower bounds stand a little
below what was found, so that a search that stopped looking cannot pass.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import pytest

from opengyre.control.config import EngineSpec, SchedulerConfig
from opengyre.control.ids import cell_engine_id, standalone_engine_id
from tests.sim.exhaustive import Found, explore
from tests.sim.exhaustive_world import Shape

CORE, CELL, ALONE = cell_engine_id(0), cell_engine_id(1), standalone_engine_id(0)
EVERYONE = (CORE, CELL, ALONE)


def make_config(*, num_cells: int = 2, num_standalone: int = 1, slots: int = 2, **numbers):
    """2 groups of 2 executions, a step each; small whole time limits of different lengths."""
    cells = tuple(
        EngineSpec(engine=cell_engine_id(k), slots=slots, cell=k) for k in range(num_cells)
    )
    standalone = tuple(
        EngineSpec(engine=standalone_engine_id(k), slots=slots, cell=None)
        for k in range(num_standalone)
    )
    defaults = {
        "num_steps": 2,
        "group_size": 2,
        "groups_per_step": 1,
        "steps_per_burst": 2,
        "run_ahead": 0,
        "supply_fraction": 0.5,
        "supply_hold_s": 1.0,
        "recall_after_s": 2.0,
        "join_deadline_s": 2.0,
        "publish_timeout_s": 2.0,
        "lost_deadline_s": 3.0,
        "cancel_deadline_s": 2.0,
        "is_strict": True,
    }
    return SchedulerConfig(
        num_cells=num_cells, engines=cells + standalone, **{**defaults, **numbers}
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """`num_states` at least; `sees` are events and commands that must occur."""

    shape: Shape
    num_states: int
    sees: tuple[str, ...]
    is_slow: bool = False


def case(
    name: str,
    config: SchedulerConfig,
    num_states: int,
    *sees: str,
    is_slow: bool = False,
    **mishaps,
) -> Case:
    shape = Shape(name=name, config=config, **mishaps)
    return Case(shape=shape, num_states=num_states, sees=("EndRun", *sees), is_slow=is_slow)


def two_bursts(**numbers) -> SchedulerConfig:
    return make_config(**{"steps_per_burst": 1, "run_ahead": 1, **numbers})


CASES = (
    case(
        "one void group and the loss of the standalone engine",
        make_config(),
        1000,
        *("lose", "ready", "Reroute", "AbandonStep", "Checkpoint", "LeaveTraining"),
        losable=(ALONE,),
        num_losses=1,
        num_nones=1,
    ),
    case(
        "one void group and the loss of the core or the satellite",
        make_config(),
        1000,
        *("lose", "ready", "DropMember", "Admit", "AbandonStep"),
        losable=(CORE, CELL),
        num_losses=1,
        num_nones=1,
    ),
    case(
        "every order of starting, with a loss",
        make_config(num_steps=1, steps_per_burst=1),
        1000,
        *("lose", "ready", "OpenDoor"),
        losable=EVERYONE,
        num_losses=1,
        is_started=False,
    ),
    case(
        "run-ahead over two bursts, one void group",
        two_bursts(),
        1000,
        *("Publish", "LeaveTraining", "DispatchGroups"),
        num_nones=1,
    ),
    case(
        "fewer slots than executions",
        make_config(slots=1),
        200,
        *("Launch", "CloseDoor"),
        num_nones=1,
        num_empties=1,
    ),
)
LIMIT = 400_000
PARAMS = [
    pytest.param(
        one,
        id=one.shape.name.replace(" ", "-"),
        marks=[pytest.mark.slow, pytest.mark.timeout(1200)] if one.is_slow else [],
    )
    for one in CASES
]


@pytest.fixture(scope="module")
def searches(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Found]]]:
    """The searches of the tests that were selected, two at a time, begun in the order of CASES."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [one.params["case"] for one in chosen if one is not None and "case" in one.params]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield {
            one.shape.name: pool.submit(explore, one.shape, LIMIT)
            for one in cases
            if isinstance(one, Case)
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", PARAMS)
def test_no_order_of_events_breaks_a_promise_and_every_state_can_still_end(
    case: Case, searches: dict[str, Future[Found]], request: pytest.FixtureRequest
) -> None:
    found = searches[case.shape.name].result()
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    terminal.write_line(
        f"\n{case.shape.name}: {found.num_states} states, {found.num_events} events, "
        f"{found.num_ends} ends, {found.depth} deep"
    )
    assert found.stuck is None, f"no end can be reached after {found.stuck}"
    assert found.num_states >= case.num_states
    assert found.num_ends > 0
    assert not [name for name in case.sees if found.seen[name] == 0]
