"""Two deadlines of an execution in whole seeded runs: one stands still while we hold it, one does
not."""

import pytest

from opengyre.control.facts import ExecutionClosed, Outcome, VerdictGiven
from opengyre.store.observations import LaunchRecorded
from tests.sim.seeded_agent import Habits
from tests.sim.seeded_faults import Fate, Fault, Harm
from tests.sim.seeded_loop import Mode
from tests.sim.seeded_world import SeededWorld, Weather

GONE_S = 90.0
PATIENCE_S = 60.0
HANGING = Weather(habits=Habits(hang_rate=0.2))


def world_with(weather: Weather, *, seed: int, **harness: object) -> SeededWorld:
    world = SeededWorld(seed=seed, mode=Mode.SHUFFLE, weather=weather)
    changed = world.config.harness.model_copy(update={"timeout_s": PATIENCE_S, **harness})
    world.config = world.config.model_copy(update={"harness": changed})
    return world


def let_the_gateway_be_gone(world: SeededWorld, event: str, number: int) -> None:
    """For GONE_S, from the event on; every execution is held meanwhile."""
    fault = Fault(
        event=event, number=number, harm=Harm.KILL_GATEWAY, engine="c0", lasts_s=0.0, delay_s=0.0
    )
    engines = tuple(str(spec.engine) for spec in world.shape.scheduler().engines)
    world.fate = Fate(world.loop, (fault,), engines)
    world.loop.on_kill = world.fate.see_kill
    delay_s = world.loop.delay_s

    def slow_to_return(what: str) -> float:
        return GONE_S if what == "start" and world.fate.deaths else delay_s(what)

    world.loop.delay_s = slow_to_return


def played(world: SeededWorld) -> list[tuple[Outcome, VerdictGiven]]:
    """(outcome, verdict) of each execution of the run, which ended well."""
    end = world.run()
    assert end is not None
    assert end.exit_code == 0
    values = [row.value for row in world.checks.rows]
    closed = {one.execution: one.outcome for one in values if isinstance(one, ExecutionClosed)}
    return [(closed[one.execution], one) for one in values if isinstance(one, VerdictGiven)]


@pytest.mark.parametrize("verdict", ["none", "graded"])
def test_the_overall_deadline_counts_held_time_and_says_so(verdict: str) -> None:
    world = world_with(
        Weather(), seed=1, overall_timeout_s=PATIENCE_S, overall_timeout_verdict=verdict
    )
    let_the_gateway_be_gone(world, "TurnTold", 4)
    found = played(world)
    late = [one for outcome, one in found if outcome is Outcome.TIMED_OUT]
    assert late
    assert len(late) < len(found)
    for one in late:
        assert "60.0 s in all (harness.overall_timeout_s)" in one.reason
        assert (one.reward is None) == (verdict == "none")
        assert one.reason.startswith("discarded" if verdict == "none" else "graded")


def test_what_is_overdue_before_it_could_start_is_not_graded() -> None:
    world = world_with(
        Weather(), seed=5, overall_timeout_s=PATIENCE_S, overall_timeout_verdict="graded"
    )
    let_the_gateway_be_gone(world, "OpenSession", 2)
    lost = [one for outcome, one in played(world) if outcome is Outcome.LOST]
    assert lost
    for one in lost:
        assert one.reward is None
        assert "was over before it could start" in one.reason


def test_the_harness_deadline_is_graded_whatever_the_overall_one_says() -> None:
    found = played(world_with(HANGING, seed=2, overall_timeout_s=10 * PATIENCE_S))
    late = [one for outcome, one in found if outcome is Outcome.TIMED_OUT]
    assert late
    assert {one.reward is None for one in late} == {False}
    assert {"in all" in one.reason for one in late} == {False}


def test_the_overall_deadline_goes_on_through_relaunches() -> None:
    """Each launch may take PATIENCE_S; what is launched again has only the rest."""
    weather = Weather(habits=Habits(hang_rate=0.5), lost_rate=0.3)
    world = world_with(weather, seed=7, overall_timeout_s=PATIENCE_S - 1)
    world.mean_s["launch"] = 4.0
    late = {one.execution for outcome, one in played(world) if outcome is Outcome.TIMED_OUT}
    began_s: dict[str, list[float]] = {}
    lasted_s = []
    for row in world.checks.rows:
        if isinstance(row.value, LaunchRecorded):
            began_s.setdefault(row.value.execution, []).append(row.now_s)
        elif isinstance(row.value, ExecutionClosed) and row.value.execution in late:
            first_s, *later_s = began_s[row.value.execution]
            if later_s and later_s[0] > first_s + 2:
                lasted_s.append(row.now_s - first_s)
    assert lasted_s
    assert min(lasted_s) < PATIENCE_S


def test_a_lost_execution_stays_lost_and_is_never_zero() -> None:
    found = played(world_with(Weather(lost_rate=0.5), seed=4, overall_timeout_s=PATIENCE_S))
    lost = [one for outcome, one in found if outcome is Outcome.LOST]
    assert lost
    assert {one.reward for one in lost} == {None}
    assert {one.reason for one in lost} == {"lost: its supervisor died"}
