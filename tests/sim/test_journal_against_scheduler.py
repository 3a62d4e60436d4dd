"""What the journal alone tells agrees with the scheduler after each plan, whatever goes wrong."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache

import msgspec
import pytest

from opengyre.control.commands import Plan
from opengyre.control.config import SchedulerConfig
from opengyre.control.groups import GroupState
from opengyre.control.scheduler import Scheduler
from opengyre.store import derive
from opengyre.store.codec import decode, encode, kind_of
from opengyre.store.journal import Row
from opengyre.store.observations import EngineSlots, RunStarted
from opengyre.views.check_control import (
    Boundaries,
    Coverage,
    OneOutcome,
    TrainingPrefix,
    Waterlevel,
)
from opengyre.views.fold import Fold
from opengyre.views.replay import replay
from tests.sim.control_world import Weather, World
from tests.sim.test_control_world import SIEVES, STORMS, make_config


def started(config: SchedulerConfig) -> RunStarted:
    return RunStarted(
        version="0",
        seed=0,
        engines=[
            EngineSlots(engine=spec.engine, cell=spec.cell, slots=spec.slots)
            for spec in config.engines
        ],
        num_steps=config.num_steps,
        steps_per_burst=config.steps_per_burst,
        groups_per_step=config.groups_per_step,
        executions_per_group=config.group_size,
        min_valid_members=config.min_valid_members,
        supply_fraction=config.supply_fraction,
        scheduler=asdict(config),
    )


def journal_of(world: World) -> Iterator[Row]:
    """The world's journal, through the codec as it would be on disk."""
    values = [(0.0, started(world.config)), *world.journal]
    for seq, (now_s, value) in enumerate(values, start=1):
        read = decode(encode(value))
        yield Row(seq=seq, now_s=now_s, kind=kind_of(read), value=read)


@cache
def storm(name: str, seed: int) -> World:
    shape = {
        "num_cells": 1 + seed % 4,
        "num_standalone": seed % 3,
        "run_ahead": seed % 3,
        "steps_per_burst": 1 + seed % 3,
        "num_eval_executions": 5,
        "eval_at_start": True,
        "eval_at_end": True,
        "eval_every_bursts": 2,
        "eval_deadline_s": 60.0,
        "recall_after_s": 20.0,
        "lost_deadline_s": 300.0,
        "max_core_losses": 50,
        **SIEVES[seed % len(SIEVES)],
    }
    weather = Weather() if name == "calm" else STORMS[name]
    world = World(make_config(**shape), replace(weather, seed=seed))
    world.run()
    return world


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["calm", *STORMS])
def test_the_fold_of_a_journal_has_the_levels_of_the_scheduler(name: str, seed: int) -> None:
    world = storm(name, seed)
    fold, scheduler = Fold(), Scheduler(world.config)
    for row in journal_of(world):
        fold.apply(row)
        if row.kind == "fact":
            scheduler.observe(row.value, row.now_s)
        if not isinstance(row.value, Plan):
            continue
        scheduler.decide(row.now_s)
        seen, state = scheduler.snapshot(), fold.state
        told = (
            seen.dispatched,
            seen.launched,
            seen.finished,
            seen.capacity,
            seen.num_ready,
            seen.num_filtered,
            seen.num_assigned,
        )
        counts = state.counts
        ours = (
            counts.dispatched,
            counts.launched,
            counts.finished,
            state.capacity,
            state.num_ready,
            sum(state.group_state(one) is GroupState.FILTERED for one in state.groups.values()),
            state.num_assigned,
        )
        assert ours == told, f"row {row.seq} at {row.now_s}"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["calm", *STORMS])
def test_the_checks_of_the_journal_pass_what_the_scheduler_did(name: str, seed: int) -> None:
    fold, boundaries = Fold(), Boundaries()
    checks = [
        OneOutcome(),
        Waterlevel(boundaries),
        Coverage(boundaries),
        TrainingPrefix(boundaries),
    ]
    world = storm(name, seed)
    for row in journal_of(world):
        fold.apply(row)
        for check in checks:
            check.see(row, fold.state)
        boundaries.see(row, fold.state)
    results = [check.finish(fold.state) for check in checks]
    if world.end is not None and world.end.failed:
        results = results[1:]
    assert [(one.promise, one.problems) for one in results if one.problems] == []


@pytest.mark.parametrize("name", ["commands fail", "everything at once"])
def test_the_tables_have_the_outcomes_of_the_fold(name: str) -> None:
    fold = Fold()
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(derive.DDL)
        for row in journal_of(storm(name, 0)):
            fold.apply(row)
            derive.apply(db, row.now_s, row.value)
        table = dict(db.execute("SELECT execution, outcome FROM executions"))
        groups = dict(db.execute("SELECT group_name, ended FROM groups"))
    outcomes = {
        one.execution: None if one.outcome is None else one.outcome.value
        for one in fold.state.executions.values()
    }
    assert table == outcomes
    assert groups == {
        one.group: None if one.num_open else fold.state.ended_state(one).value
        for one in fold.state.groups.values()
    }
    assert (name == "commands fail") or {"filtered", "void", "ready"} <= {*groups.values()}
    assert "failed" in table.values()


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_of_a_journal_gives_the_same_plans_and_finds_one_that_differs(seed: int) -> None:
    world = storm("everything at once", seed)
    rows = list(journal_of(world))

    def make(fields: dict[str, object]) -> Scheduler:
        return Scheduler(msgspec.convert(fields, SchedulerConfig))

    result = replay(rows, make)
    assert result.is_same, result.difference
    assert result.num_plans == sum(isinstance(row.value, Plan) for row in rows)
    place = next(
        n
        for n, row in enumerate(rows)
        if isinstance(row.value, Plan) and len(row.value.commands) > 1
    )
    plan: Plan = rows[place].value
    rows[place] = replace(rows[place], value=replace(plan, commands=plan.commands[:-1]))
    assert f"row {rows[place].seq} at" in replay(rows, make).difference
