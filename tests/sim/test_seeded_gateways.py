"""Deaths of gateways in whole seeded runs: time without one is ours, and so is one that hangs."""

import pytest

from opengyre.control.facts import ExecutionClosed, Outcome
from opengyre.store.observations import GatewayLost
from tests.sim.seeded_faults import Fate, Fault, Harm
from tests.sim.seeded_loop import Mode
from tests.sim.seeded_world import SeededWorld

GONE_S = 90.0
PATIENCE_S = 60.0


def world_with(harm: Harm, *, seed: int, lasts_s: float = 0.0) -> SeededWorld:
    """Undisturbed but for one `harm` to a gateway once some turns were told."""
    world = SeededWorld(seed=seed, mode=Mode.SHUFFLE)
    fault = Fault(event="TurnTold", number=4, harm=harm, engine="c0", lasts_s=lasts_s, delay_s=0.0)
    engines = tuple(str(spec.engine) for spec in world.shape.scheduler().engines)
    world.fate = Fate(world.loop, (fault,), engines)
    world.loop.on_kill = world.fate.see_kill
    harness = world.config.harness.model_copy(update={"timeout_s": PATIENCE_S})
    world.config = world.config.model_copy(update={"harness": harness})
    return world


def rows_of(world: SeededWorld, kind: type) -> list[object]:
    return [row.value for row in world.checks.rows if isinstance(row.value, kind)]


@pytest.mark.parametrize("seed", range(4))
def test_time_without_a_gateway_is_not_charged_to_any_execution(seed: int) -> None:
    world = world_with(Harm.KILL_GATEWAY, seed=seed)
    delay_s = world.loop.delay_s

    def slow_to_return(what: str) -> float:
        return GONE_S if what == "start" and world.fate.deaths else delay_s(what)

    world.loop.delay_s = slow_to_return
    end = world.run()
    assert end is not None
    assert end.exit_code == 0
    (lost,) = rows_of(world, GatewayLost)
    assert isinstance(lost, GatewayLost)
    assert lost.executions
    assert lost.gone_s is not None
    assert lost.gone_s > GONE_S > PATIENCE_S
    closed = [one for one in rows_of(world, ExecutionClosed) if isinstance(one, ExecutionClosed)]
    assert {one.outcome for one in closed} <= {Outcome.COMPLETED, Outcome.CANCELLED}


def test_a_gateway_that_hangs_is_ended_and_started_anew() -> None:
    world = world_with(Harm.STOP_GATEWAY, seed=1, lasts_s=3000.0)
    end = world.run()
    assert end is not None
    assert end.exit_code == 0
    assert len(rows_of(world, GatewayLost)) == 1
    assert world.loop.time() < 300.0
