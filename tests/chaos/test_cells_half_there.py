"""Cells that go on after they were given up, are called back in mid-step, or come up in part."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from run_rig import make_trails

from opengyre.control import facts as f
from opengyre.runtime import messages as m
from opengyre.runtime.run import Run
from opengyre.store.observations import MemberJoined, MicroStepReturned, RoleChange
from tests.chaos.chaos_rig import assert_it_held
from tests.chaos.faults import Moment
from tests.chaos.scene import NUM_STEPS, SATELLITE, Scene, drive_scene
from tests.chaos.striker import stage_pids
from tests.chaos.tap import until

pytestmark = pytest.mark.timeout(400)

STAGES = [
    pytest.param((False, 0), id="emulated"),
    pytest.param((True, 0), id="lead of two stages", marks=pytest.mark.slow),
    pytest.param((True, 1), id="stage 1 of two", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 8)


@pytest.mark.parametrize("kind", STAGES)
def test_a_cell_that_goes_on_after_its_step_dropped_it_disturbs_nothing(
    kind: tuple[bool, int], tmp_path: Path, trails: Path
) -> None:
    is_staged, stage = kind

    async def play(scene: Scene) -> None:
        await scene.before(lambda message: isinstance(message, m.JoinStep), _stop(scene, stage))
        pid = scene.pid(stage)
        await scene.dropped()
        os.kill(pid, signal.SIGCONT)

    driven = drive_scene(tmp_path, trails, play, "schedule.join_deadline_s=1", is_staged=is_staged)
    assert_it_held(driven, num_steps=NUM_STEPS)
    assert not driven.all(f.EngineLost)
    assert driven.all(MemberJoined)


@pytest.mark.parametrize("kind", STAGES)
def test_a_satellite_recalled_with_work_in_hand_gives_it_back_and_its_late_word_counts_nothing(
    kind: tuple[bool, int], tmp_path: Path, trails: Path
) -> None:
    """It stands still from its claim on until it was called back, because the standalone engine
    died."""
    is_staged, stage = kind

    async def play(scene: Scene) -> None:
        run = scene.run
        await scene.moment(Moment.WORK)
        while not _is_short_without(run, "s0"):
            await scene.moment(Moment.WORK)
        pid = scene.pid(stage)
        os.kill(pid, signal.SIGSTOP)
        os.kill(run.processes.pid("s0"), signal.SIGKILL)
        await until(lambda: not run.steps.holds_work(SATELLITE))
        os.kill(pid, signal.SIGCONT)

    driven = drive_scene(
        tmp_path,
        trails,
        play,
        "schedule.recall_after_s=0.2",
        "schedule.steps_per_burst=4",
        "schedule.run_ahead=2",
        "schedule.max_staleness=6",
        "engine.scripted.tokens_per_s=60",
        is_staged=is_staged,
    )
    assert_it_held(driven, num_steps=NUM_STEPS)
    assert [one.engine for one in driven.all(f.EngineLost)] == ["s0"]
    assert {one.cell for one in driven.all(MicroStepReturned)} >= {SATELLITE}


@pytest.mark.parametrize("kind", STAGES)
def test_a_run_that_ends_while_a_cell_stands_still_ends_in_order_and_leaves_nothing(
    kind: tuple[bool, int], tmp_path: Path, trails: Path
) -> None:
    is_staged, stage = kind

    async def play(scene: Scene) -> None:
        await scene.before(_is_last_checkpoint, _stop(scene, stage), of="c0")

    driven = drive_scene(tmp_path, trails, play, is_staged=is_staged)
    assert_it_held(driven, num_steps=NUM_STEPS)


def test_a_cell_one_stage_of_which_cannot_pull_takes_no_part_in_that_step(
    tmp_path: Path, trails: Path
) -> None:
    """What the core's second stage shows of the weights between two publications goes away."""

    async def play(scene: Scene) -> None:
        def take_away() -> None:
            for shown in scene.run.opened.planes.glob("c0-1-weights.*"):
                shown.unlink()

        await scene.before(lambda message: _joins_unpublished(scene.run, message), take_away)

    driven = drive_scene(tmp_path, trails, play, is_staged=True)
    assert_it_held(driven, num_steps=NUM_STEPS)
    refused = [one for one in driven.all(f.CommandUnknown) if "c0-1-weights" in one.reason]
    assert len(refused) == 1
    assert not driven.all(f.EngineLost)
    assert driven.all(MemberJoined)


def test_a_cell_one_stage_of_which_dies_at_its_start_is_started_again(
    tmp_path: Path, trails: Path
) -> None:
    async def play(scene: Scene) -> None:
        processes = scene.run.processes
        os.kill(scene.pid(), signal.SIGKILL)
        await until(lambda: processes.incarnation("c1") == 2 and bool(_others(scene)))
        os.kill(_others(scene)[0], signal.SIGKILL)
        await until(lambda: processes.incarnation("c1") == 3 and processes.is_alive("c1"))

    driven = drive_scene(tmp_path, trails, play, is_staged=True)
    assert_it_held(driven, num_steps=NUM_STEPS)
    assert [one.incarnation for one in driven.all(f.EngineLost)] == [1, 2]
    assert [one.cell for one in driven.all(RoleChange)]


def _stop(scene: Scene, stage: int) -> Callable[[], None]:
    return lambda: os.kill(scene.pid(stage), signal.SIGSTOP)


def _is_last_checkpoint(message: m.Message) -> bool:
    return isinstance(message, m.SaveState) and f"step-{NUM_STEPS}." in message.folder


def _joins_unpublished(run: Run, message: m.Message) -> bool:
    published = run.scheduler.snapshot().published_version
    return isinstance(message, m.JoinStep) and message.version > published


def _is_short_without(run: Run, engine: str) -> bool:
    """Would more executions run than there are slots, in a step that is not the burst's last?"""
    view = run.scheduler.snapshot()
    left = sum(one.slots for one in view.engines if one.engine == engine)
    return view.capacity - left < view.waterlevel and view.step_in_burst < view.steps_per_burst


def _others(scene: Scene) -> list[int]:
    return stage_pids(scene.pid())
