"""Colocate and async beside elastic: the same storms, each with and without streaming."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from opengyre.control import commands as c
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.config import PolicyName
from opengyre.control.scheduler import Scheduler
from tests.sim.control_world import Weather, World
from tests.sim.test_control_world import STORMS, make_config

POLICIES = list(PolicyName)


def policy_config(policy: PolicyName, *, is_streaming: bool, **numbers: object):
    num_training = 2 if policy is PolicyName.ASYNC else 0
    return make_config(
        policy=policy, is_streaming=is_streaming, num_training_cells=num_training, **numbers
    )


def plans(world: World) -> Iterator[tuple[float, c.Plan]]:
    return ((now_s, one) for now_s, one in world.journal if isinstance(one, c.Plan))


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_calm_run_trains_every_step(policy: PolicyName, is_streaming: bool, seed: int) -> None:
    config = policy_config(policy, is_streaming=is_streaming)
    world = World(config, Weather(seed=seed, no_verdict_rate=0.0))
    assert not world.run().failed
    view = world.scheduler.snapshot()
    assert (view.steps_done, view.num_consumed) == (6, 24)


@pytest.mark.parametrize("name", STORMS)
@pytest.mark.parametrize("policy", [PolicyName.COLOCATE, PolicyName.ASYNC])
@pytest.mark.parametrize("seed", range(6))
def test_a_storm_breaks_no_promise_and_the_run_ends(
    policy: PolicyName, name: str, seed: int
) -> None:
    config = policy_config(
        policy,
        is_streaming=seed % 2 == 0,
        num_cells=2 + seed % 3,
        num_standalone=1 + seed % 2,
        run_ahead=seed % 3,
        steps_per_burst=1 + seed % 3,
        num_eval_executions=5,
        eval_every_bursts=2,
        eval_at_end=True,
        eval_deadline_s=60.0,
        recall_after_s=20.0,
        lost_deadline_s=300.0,
        max_core_losses=50,
    )
    world = World(config, replace(STORMS[name], seed=seed))
    world.run()
    assert world.scheduler.snapshot().waterlevel == 0 or world.end.failed


@pytest.mark.parametrize("policy", POLICIES)
def test_the_journal_of_each_policy_replays_to_the_same_plans(policy: PolicyName) -> None:
    config = policy_config(policy, is_streaming=True, recall_after_s=20.0)
    world = World(config, replace(STORMS["everything at once"], seed=3))
    world.run()
    again = Scheduler(config)
    for now_s, entry in world.journal:
        if isinstance(entry, c.Plan):
            assert again.decide(now_s) == entry
        else:
            again.observe(entry, now_s)


@pytest.mark.parametrize("seed", range(4))
def test_colocated_cells_close_their_doors_in_one_plan(seed: int) -> None:
    config = policy_config(PolicyName.COLOCATE, is_streaming=True, num_cells=4)
    world = World(config, Weather(seed=seed))
    world.run()
    closing = [
        {one.engine for one in plan.commands if isinstance(one, c.CloseDoor)}
        for _, plan in plans(world)
    ]
    assert {frozenset(one) for one in closing if one} == {frozenset({"c0", "c1", "c2", "c3"})}


@pytest.mark.parametrize("policy", POLICIES)
def test_without_streaming_a_step_is_offered_whole(policy: PolicyName) -> None:
    world = World(
        policy_config(policy, is_streaming=False, steps_per_burst=3), Weather(void_rate=0.0)
    )
    world.run()
    first_offer: dict[int, c.Offer] = {}
    for _, plan in plans(world):
        for command in plan.commands:
            if isinstance(command, c.Offer):
                first_offer.setdefault(command.step, command)
    assert sorted(first_offer) == [1, 2, 3, 4, 5, 6]
    assert {len(one.groups) for one in first_offer.values()} == {4}


def test_without_streaming_colocate_leaves_when_the_whole_burst_is_ready() -> None:
    config = policy_config(PolicyName.COLOCATE, is_streaming=False, steps_per_burst=2, run_ahead=0)
    world = World(config, Weather(no_verdict_rate=0.0))
    world.run()
    reasons = [
        command.reason
        for _, plan in plans(world)
        for command in plan.commands
        if isinstance(command, c.CloseDoor) and command.engine == "c0"
    ]
    assert len(reasons) == 3
    assert all("8 of 4 groups ready" in reason for reason in reasons), reasons


def test_async_cells_train_from_the_first_burst_and_never_serve() -> None:
    config = policy_config(PolicyName.ASYNC, is_streaming=True, num_cells=4)
    world = World(config, Weather())
    world.run()
    given = [command for _, plan in plans(world) for command in plan.commands]
    assert not [one for one in given if isinstance(one, c.CloseDoor | c.LeaveTraining)]
    assert [one.cell for one in given if isinstance(one, c.EnterTraining)] == [0, 1]
    assert {one.engine for one in given if isinstance(one, c.Launch)} == {"c2", "c3", "s0"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_index_of_the_topology_equals_a_walk_over_it(policy: PolicyName, seed: int) -> None:
    config = policy_config(policy, is_streaming=True, recall_after_s=20.0, max_core_losses=50)
    world = World(config, replace(STORMS["everything at once"], seed=seed))
    run, observe = world.scheduler._run, world._observe

    def checked(fact: object) -> None:
        observe(fact)
        topology = run.topology
        for state in EngineState:
            found = {name for name, one in topology.engines.items() if one.state is state}
            assert set(topology.engines_by_state[state]) == found
        for role in CellRole:
            assert set(topology.cells_by_role[role]) == {
                cell.cell for cell in topology.cells if cell.role is role
            }
        serving = [one for one in topology.engines.values() if one.is_serving]
        assert topology.capacity == sum(one.slots for one in serving)
        is_open = [one for one in topology.engines.values() if one.state is EngineState.OPEN]
        assert topology.num_free_open == sum(one.num_free for one in is_open)
        assert set(topology.must_return) == {one.cell for one in topology.cells if one.must_return}

    world._observe = checked
    world.run()
