"""Every order of events in small worlds: no promise broken, and an end within reach of all.

Each shape is searched whole, two at a time; its counts are printed. Lower bounds stand a little
below what was found, so that a search that stopped looking cannot pass.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import pytest

from opengyre.control.config import EngineSpec, SchedulerConfig
from opengyre.control.ids import cell_engine_id, standalone_engine_id
from opengyre.control.scheduler import Scheduler
from tests.sim.exhaustive import Found, explore, first_without_end
from tests.sim.exhaustive_key import Keyer
from tests.sim.exhaustive_world import Shape, new_world

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
        25_000,
        *("lose", "ready", "Reroute", "Checkpoint", "LeaveTraining"),
        losable=(ALONE,),
        num_losses=1,
        num_nones=1,
    ),
    case(
        "one void group and the loss of the core or the satellite",
        make_config(),
        12_000,
        *("lose", "ready", "DropMember", "Admit", "AbandonStep"),
        losable=(CORE, CELL),
        num_losses=1,
        num_nones=1,
    ),
    case(
        "every order of starting, with a loss",
        make_config(num_steps=1, steps_per_burst=1),
        2_500,
        *("lose", "ready", "OpenDoor"),
        losable=EVERYONE,
        num_losses=1,
        is_started=False,
    ),
    case(
        "run-ahead over two bursts, one void group",
        two_bursts(),
        3_000,
        *("Publish", "LeaveTraining", "DispatchGroups"),
        num_nones=1,
    ),
    case(
        "fewer slots than executions",
        make_config(slots=1),
        1_000,
        *("Launch", "CloseDoor"),
        num_nones=1,
        num_empties=1,
    ),
    case(
        "groups are filtered, half of them more than steps take",
        make_config(filter_zero_variance=True, oversample=1.5),
        5_000,
        *("CloseStep", "Cancel", "commit"),
        num_odds=2,
    ),
    case(
        "groups are filtered, twice as many as steps take, a boundary after each",
        make_config(steps_per_burst=1, filter_zero_variance=True, oversample=2.0),
        4_000,
        *("Publish", "Cancel", "commit"),
        num_odds=1,
    ),
    case(
        "groups are filtered, run-ahead over two bursts, oversampled",
        two_bursts(filter_zero_variance=True, oversample=1.5),
        6_000,
        *("Publish", "LeaveTraining", "Cancel", "commit"),
        num_odds=1,
        is_slow=True,
    ),
    case(
        "two bursts without a standalone engine, one void group, one loss",
        two_bursts(num_standalone=0),
        17_000,
        *("lose", "ready", "Reroute", "DropMember", "Publish"),
        losable=(CORE, CELL),
        num_losses=1,
        num_nones=1,
        is_slow=True,
    ),
    case(
        "one burst without a standalone engine, one void group, one loss",
        make_config(num_standalone=0),
        13_000,
        *("lose", "ready", "Reroute", "DropMember"),
        losable=(CORE, CELL),
        num_losses=1,
        num_nones=1,
        is_slow=True,
    ),
    case(
        "a boundary after each step, one void group, one loss",
        make_config(steps_per_burst=1),
        16_000,
        *("lose", "ready", "Reroute", "DropMember", "Publish"),
        losable=EVERYONE,
        num_losses=1,
        num_nones=1,
        is_slow=True,
    ),
    case(
        "run-ahead over two bursts, the loss of the standalone engine",
        two_bursts(),
        23_000,
        *("lose", "ready", "Reroute", "Publish"),
        losable=(ALONE,),
        num_losses=1,
        is_slow=True,
    ),
    case(
        "run-ahead over two bursts, the loss of the core or the satellite",
        two_bursts(),
        14_000,
        *("lose", "ready", "DropMember", "Publish"),
        losable=(CORE, CELL),
        num_losses=1,
        is_slow=True,
    ),
    case(
        "one command that fails, is unknown or late",
        make_config(),
        6_500,
        *("fail", "unknown", "fail loose", "unknown loose", "fail launch", "Fence"),
        num_faults=1,
        is_slow=True,
    ),
)
LIMIT = 400_000
PARAMS = [
    pytest.param(
        one,
        id=one.shape.name.replace(" ", "-"),
        marks=[pytest.mark.slow, pytest.mark.timeout(1800)] if one.is_slow else [],
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
    case: Case,
    searches: dict[str, Future[Found]],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = searches[case.shape.name].result()
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    with capsys.disabled():
        terminal.write_line(
            f"\n{case.shape.name}: {found.num_states} states, {found.num_events} events, "
            f"{found.num_ends} ends, {found.depth} deep"
        )
    assert found.stuck is None, f"no end can be reached after {found.stuck}"
    assert found.num_states >= case.num_states
    assert found.num_ends > 0
    assert not [name for name in case.sees if found.seen[name] == 0]


def test_the_search_backwards_names_the_first_state_without_an_end() -> None:
    sources, targets = [0, 0, 1, 2], [1, 2, 3, 2]
    assert first_without_end(4, sources, targets, [3]) == 2
    assert first_without_end(4, sources, targets, [2, 3]) is None


def test_what_is_folded_and_what_is_left_out_changes_nothing_that_can_be_seen() -> None:
    """The same roles, slots, groups and steps occur with all names and all moments of verdicts."""
    shape = Shape(name="small", config=make_config())
    folded = explore(shape, LIMIT)
    named = explore(shape, LIMIT, is_folding=False)
    late = explore(replace(shape, has_late_verdicts=True), LIMIT)
    assert folded.num_states < late.num_states
    assert folded.num_states < named.num_states
    assert folded.pictures == named.pictures == late.pictures


def test_a_state_that_holds_an_unknown_type_is_refused() -> None:
    shape = Shape(name="odd", config=make_config())
    run, world = Scheduler(shape.config)._run, new_world(shape)
    keyer = Keyer(frozenset(run.engines), 4.0)
    assert keyer.key(run, world, 0.0) == keyer.key(run, world, 0.0)
    run.failure = {"a set"}  # type: ignore[assignment]
    with pytest.raises(TypeError, match="say how it is compared"):
        keyer.key(run, world, 0.0)
