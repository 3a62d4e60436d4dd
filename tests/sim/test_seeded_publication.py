"""Publications while engines pull slowly, in whole seeded runs: who waits for whom."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from opengyre.control.commands import Expose, OpenStep, Plan
from opengyre.control.config import PolicyName, SchedulerConfig
from opengyre.control.facts import CommandApplied, StepCommitted
from opengyre.store.journal import Row
from opengyre.store.observations import VersionPublished
from tests.sim.seeded_loop import HOST, Mode
from tests.sim.seeded_shape import Shape
from tests.sim.seeded_world import SeededWorld

PULL_S = 20.0
TRAIN_S = 1.0
SHORT_S = 0.2
ENGINES = ("c1", "c2", "s0")


class CoreApart(Shape):
    """The core always trains; three engines never do."""

    def scheduler(self) -> SchedulerConfig:
        return replace(super().scheduler(), policy=PolicyName.ASYNC, num_training_cells=1)


def world_of(seed: int, pull_s: Callable[[str], float], **shape: int) -> SeededWorld:
    """`pull_s(engine)` is how long an engine pulls. Groups are ready long before they are trained;
    nothing else takes long."""
    world = SeededWorld(seed=seed, mode=Mode.SHUFFLE)
    drawn = {name: getattr(world.shape, name) for name in Shape.__slots__}
    sizes = {"num_cells": 3, "slots_per_cell": 8, "slots_per_standalone": 8, "num_eval": 0}
    world.shape = CoreApart(**(drawn | sizes | {"tokens_per_s": 20.0} | shape))
    delay_s = world.loop.delay_s

    def slow_pulls(what: str) -> float:
        host = HOST.get()
        if what == "pull_all" and host is not None:
            return pull_s(host.name)
        return TRAIN_S if what == "run" else min(SHORT_S, delay_s(what))

    world.loop.delay_s = slow_pulls
    return world


def rows_of(world: SeededWorld) -> list[Row]:
    rows: list[Row] = []
    world.on_row.append(rows.append)
    end = world.run()
    assert end is not None
    assert end.exit_code == 0
    return rows


def applied(rows: list[Row], kind: type) -> dict[int, float]:
    """When the first command of `kind` for each version was done."""
    plans = [row.value for row in rows if isinstance(row.value, Plan)]
    commands = {one.command_id: one for plan in plans for one in plan.commands}
    done = [(row, commands[row.value.command_id]) for row in rows if _is_applied(row)]
    return {one.version: row.now_s for row, one in reversed(done) if isinstance(one, kind)}


def _is_applied(row: Row) -> bool:
    return isinstance(row.value, CommandApplied)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_the_core_goes_on_while_three_engines_pull_at_the_same_time(seed: int) -> None:
    rows = rows_of(world_of(seed, lambda _: PULL_S, steps_per_burst=2, run_ahead=2, num_steps=6))
    exposed = applied(rows, Expose)
    version = sorted(exposed)[1]
    exposed_s, opened_s = exposed[version], applied(rows, OpenStep)[version]
    assert exposed_s <= opened_s < exposed_s + 4 * SHORT_S
    published = [row for row in rows if isinstance(row.value, VersionPublished)]
    ended_s = {row.value.engine: row.now_s for row in published if row.value.version == version}
    assert set(ended_s) == set(ENGINES)
    assert all(PULL_S < at_s - exposed_s < PULL_S + 10 * SHORT_S for at_s in ended_s.values())
    committed_s = [row.now_s for row in rows if isinstance(row.value, StepCommitted)]
    assert any(exposed_s < at_s < min(ended_s.values()) for at_s in committed_s)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_an_engine_whose_version_was_withdrawn_while_it_pulled_loads_the_newer_one(
    seed: int,
) -> None:
    """Bursts of one step: the third version takes the place of the first. Without a fault a world
    bears no command that failed and no engine that is lost."""
    slow = iter([0.0, 12.0])

    def pull_s(engine: str) -> float:
        return next(slow, 0.0) if engine == "c1" else 0.0

    rows = rows_of(world_of(seed, pull_s, steps_per_burst=1, run_ahead=4, num_steps=8))
    loaded = [
        row.value.version
        for row in rows
        if isinstance(row.value, VersionPublished) and row.value.engine == "c1"
    ]
    assert loaded[0] == 1
    assert 2 not in loaded
    assert max(loaded) >= 4
