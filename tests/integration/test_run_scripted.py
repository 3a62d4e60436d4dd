"""The whole system with scripted engines and emulated cells, undisturbed and disturbed."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest
from run_rig import Driven, drive, make_trails, stir, until, until_tokens_flow, until_trains
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.control import facts as f
from opengyre.runtime.run import Run
from opengyre.store.observations import Continued, MemberJoined, StepReport, VersionPublished
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(180)

# Steps of about a second in several micro-steps: satellites find a step to join.
SLOW_STEPS = ("training.emulated_tokens_per_s=400", "training.micro_step_tokens=560")


def assert_promises_are_kept(driven: Driven) -> None:
    results = verify_run(open_run_folder(driven.end.folder))
    broken = [problem for result in results for problem in result.problems]
    assert not broken
    assert all(result.is_kept for result in results)
    replayed = CliRunner().invoke(app, ["run", "replay", str(driven.end.folder)])
    assert replayed.exit_code == 0, replayed.output


def assert_nothing_is_left(driven: Driven) -> None:
    """No process and no folder of a run that this test process drove."""
    owned = (str(driven.end.folder), f"gyre-{os.getpid()}-")
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        words = entry.read_bytes().decode(errors="replace") if entry.exists() else ""
        assert not [mark for mark in owned if mark in words]
    for base in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        assert not list(base.glob(f"gyre-{os.getpid()}-*"))


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 8)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, trails: Path) -> Driven:
    return drive(tmp_path_factory.mktemp("undisturbed"), trails, *SLOW_STEPS)


def test_a_run_of_six_steps_ends_with_every_execution_completed(undisturbed: Driven) -> None:
    assert undisturbed.end.exit_code == 0
    outcomes = undisturbed.outcomes()
    assert len(outcomes) == 6 * 4 * 4
    assert set(outcomes.values()) == {f.Outcome.COMPLETED}
    steps = undisturbed.all(StepReport)
    assert [step.version_after for step in steps] == [1, 2, 3, 4, 5, 6]
    assert sum(len(step.groups) for step in steps) == 24
    assert_promises_are_kept(undisturbed)
    assert_nothing_is_left(undisturbed)


def test_cells_change_roles_and_a_satellite_joins(undisturbed: Driven) -> None:
    assert undisturbed.all(MemberJoined)
    assert {one.version for one in undisturbed.all(VersionPublished)} >= {2, 4}


def test_requests_frozen_at_every_few_tokens_give_the_same_tokens_as_undisturbed_ones(
    tmp_path: Path, trails: Path, undisturbed: Driven
) -> None:
    async def disturb(run: Run) -> None:
        await stir(run, every_s=0.03)

    disturbed = drive(tmp_path, trails, watch=disturb)
    assert disturbed.end.exit_code == 0
    assert len(disturbed.all(Continued)) > 30
    assert disturbed.completions() == undisturbed.completions()
    assert set(disturbed.outcomes().values()) == {f.Outcome.COMPLETED}
    assert_promises_are_kept(disturbed)


def test_a_publication_in_mid_turn_gives_one_turn_with_spans_of_two_versions(
    tmp_path: Path, trails: Path
) -> None:
    slow = drive(
        tmp_path,
        trails,
        "engine.scripted.tokens_per_s=25",
        "run.num_steps=4",
        "schedule.run_ahead=2",
        "schedule.max_staleness=4",
        "topology.slots_per_standalone=48",
    )
    assert slow.end.exit_code == 0
    across = [one for one in slow.all(Continued) if one.reason == "publication"]
    assert across
    assert any(one.num_continued for one in slow.all(VersionPublished))
    assert_promises_are_kept(slow)


def test_the_death_of_the_standalone_engine_costs_no_execution(
    tmp_path: Path, trails: Path, undisturbed: Driven
) -> None:
    async def kill_once(run: Run) -> None:
        await until_tokens_flow(run)
        os.kill(run.processes.pid("s0"), signal.SIGKILL)
        await asyncio.Event().wait()

    killed = drive(tmp_path, trails, "engine.scripted.tokens_per_s=40", watch=kill_once)
    assert killed.end.exit_code == 0
    assert [fact.engine for fact in killed.all(f.EngineLost)] == ["s0"]
    assert set(killed.outcomes().values()) == {f.Outcome.COMPLETED}
    assert any(one.reason == "engine_lost" for one in killed.all(Continued))
    assert killed.completions() == undisturbed.completions()
    assert_promises_are_kept(killed)


@pytest.mark.parametrize("cell", ["c0", "c1"])
def test_a_cell_that_dies_in_training_costs_no_group_and_no_execution(
    tmp_path: Path, trails: Path, cell: str
) -> None:
    async def kill_in_training(run: Run) -> None:
        await until_trains(run, int(cell[1:]))
        os.kill(run.processes.pid(cell), signal.SIGKILL)
        await asyncio.Event().wait()

    killed = drive(tmp_path, trails, *SLOW_STEPS, watch=kill_in_training)
    assert killed.end.exit_code == 0
    assert [fact.engine for fact in killed.all(f.EngineLost)] == [cell]
    assert set(killed.outcomes().values()) == {f.Outcome.COMPLETED}
    accepted = {step.step: step.groups for step in killed.all(StepReport)}
    groups = [group for step in accepted.values() for group in step]
    assert len(accepted) == 6
    assert len(groups) == len(set(groups)) == 24
    assert_promises_are_kept(killed)


def test_an_engine_that_dies_late_in_a_burst_loads_the_published_version(
    tmp_path: Path, trails: Path
) -> None:
    """The core has exposed several newer snapshots by then."""

    async def kill_late(run: Run) -> None:
        await until(lambda: run.scheduler.snapshot().steps_done >= 7)
        os.kill(run.processes.pid("s0"), signal.SIGKILL)
        await asyncio.Event().wait()

    long_bursts = ("schedule.steps_per_burst=4", "schedule.max_staleness=5", "run.num_steps=8")
    killed = drive(tmp_path, trails, *SLOW_STEPS, *long_bursts, watch=kill_late)
    assert killed.end.exit_code == 0
    ready = [fact for fact in killed.all(f.EngineReady) if fact.engine == "s0"]
    assert [(fact.incarnation, fact.version) for fact in ready] == [(1, 0), (2, 4)]
    assert_promises_are_kept(killed)


def test_a_group_without_verdicts_is_void_and_makes_a_short_step(
    tmp_path: Path, trails: Path
) -> None:
    broken = make_trails(tmp_path / "trails", 4)
    first = sorted(broken.iterdir())[0]
    (first / "tests" / "test.sh").write_text("#!/bin/bash\nexit 3\n")
    driven = drive(
        tmp_path, broken, "schedule.run_ahead=0", "schedule.max_staleness=1", "run.num_steps=2"
    )
    assert driven.end.exit_code == 0
    steps = driven.all(StepReport)
    assert [len(step.groups) for step in steps] == [4, 2]
    assert [step.is_short for step in steps] == [False, True]
    verdicts = [fact for fact in driven.all(f.VerdictGiven) if fact.reward is None]
    assert len(verdicts) == 8
    assert_promises_are_kept(driven)


def test_an_interrupted_run_ends_in_order_and_leaves_nothing(tmp_path: Path, trails: Path) -> None:
    async def interrupt(run: Run) -> None:
        await until_tokens_flow(run)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    driven = drive(tmp_path, trails, watch=interrupt)
    assert driven.end.exit_code == 3
    assert f.Outcome.CANCELLED in driven.outcomes().values()
    assert_promises_are_kept(driven)
    assert_nothing_is_left(driven)


POLICIES = {
    "colocate": ("schedule.policy=colocate",),
    "async without streaming": (
        "schedule.policy=async",
        "schedule.num_training_cells=2",
        "schedule.streaming=false",
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_under_another_policy_trains_every_step_and_replays_exactly(
    name: str, tmp_path: Path, trails: Path
) -> None:
    driven = drive(tmp_path, trails, *SLOW_STEPS, *POLICIES[name])
    assert driven.end.exit_code == 0
    assert len(driven.all(StepReport)) == 6
    assert set(driven.outcomes().values()) == {f.Outcome.COMPLETED}
    assert_promises_are_kept(driven)
