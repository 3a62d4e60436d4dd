"""Whole runs whose weights and gradients travel over TCP, undisturbed and with a core that dies."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from run_rig import Driven, drive, make_trails, until

from opengyre.control import facts as f
from opengyre.runtime.run import Run
from opengyre.store.observations import MemberJoined, StepReport, VersionPublished
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(180)

# Steps of about a second in several micro-steps: satellites find a step to join.
OVER_TCP = (
    "topology.weight_plane=tcp",
    "training.emulated_tokens_per_s=400",
    "training.micro_step_tokens=560",
    "run.num_steps=4",
)


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 8)


def assert_it_went_well(driven: Driven) -> None:
    assert driven.end.exit_code == 0
    assert set(driven.outcomes().values()) == {f.Outcome.COMPLETED}
    results = verify_run(open_run_folder(driven.end.folder))
    assert not [problem for result in results for problem in result.problems]
    assert all(result.is_kept for result in results)


def test_a_run_over_tcp_trains_every_step_and_leaves_the_folder_of_files_empty(
    tmp_path: Path, trails: Path
) -> None:
    seen: set[str] = set()

    async def look(run: Run) -> None:
        while True:
            seen.update(path.name for path in run.opened.planes.iterdir())
            await asyncio.sleep(0.05)

    driven = drive(tmp_path, trails, *OVER_TCP, watch=look)
    assert_it_went_well(driven)
    assert [step.version_after for step in driven.all(StepReport)] == [1, 2, 3, 4]
    assert driven.all(MemberJoined)
    assert 2 in {one.version for one in driven.all(VersionPublished)}
    assert seen == set()


def test_a_core_that_dies_while_engines_load_from_it_costs_only_itself(
    tmp_path: Path, trails: Path
) -> None:
    """Its connections die with it; the engine that was to load finds the weights at its next
    life."""

    async def kill_when_published(run: Run) -> None:
        def is_published(version: int) -> bool:
            return run.steps.last_published is not None and run.steps.last_published[0] == version

        await until(lambda: run.scheduler.snapshot().steps_done >= 1)
        os.kill(run.processes.pid("s0"), signal.SIGSTOP)
        await until(lambda: is_published(2))
        os.kill(run.processes.pid("c0"), signal.SIGKILL)
        await asyncio.sleep(1.0)
        os.kill(run.processes.pid("s0"), signal.SIGCONT)
        await asyncio.Event().wait()

    killed = drive(tmp_path, trails, *OVER_TCP, watch=kill_when_published)
    assert_it_went_well(killed)
    assert [fact.engine for fact in killed.all(f.EngineLost)] == ["c0"]
    assert "s0" in {one.engine for one in killed.all(VersionPublished) if one.version == 2}
    assert len(killed.all(StepReport)) == 4
