"""The quickstart's own config, shortened: a real model, real gradients, real role changes.

It asserts the mechanism, never the reward.
"""

import asyncio
import os
import signal

import pytest
from quickstart_rig import QUICKSTART, SHORT, make_tasks
from run_rig import Driven, drive, until

from opengyre.control import facts as f
from opengyre.control.cells import EngineState
from opengyre.control.view import EngineView
from opengyre.runtime.run import Run
from opengyre.seams.kv import HandoffStage
from opengyre.store.observations import Continued, EvalResult, Handoff, MemberJoined, StepReport
from opengyre.store.run_folder import open_run_folder
from opengyre.views.fold import fold
from opengyre.views.summary import summarise
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(300)
FREEZING = "cell 1 is leaving rollout: freezing"


async def slow_satellite(run: Run) -> None:
    """Let the first satellite's process run a tenth of the time, once it has executions, and not at
    all from when its door is shut until it has been told to freeze: it is in the middle of turns
    then, whatever the speed of the machine."""
    await until(lambda: run.told.num_sampled_tokens > 0 and _satellite(run).num_used > 0)
    pid = run.processes.pid("c1")
    os.kill(pid, signal.SIGSTOP)
    try:
        while _satellite(run).state is not EngineState.SHUT:
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: FREEZING in run.scheduler.snapshot().waiting_for)
    finally:
        os.kill(pid, signal.SIGCONT)


def _satellite(run: Run) -> EngineView:
    return next(one for one in run.scheduler.snapshot().engines if one.engine == "c1")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """As many tasks as groups until then, so that what the satellite hands over is of tasks that no
    other engine has seen: it must be read."""
    folder = tmp_path_factory.mktemp("quickstart")
    train = make_tasks(folder / "train", seed=21, num=16)
    held_out = make_tasks(folder / "eval", seed=22, num=4)
    sets = (f'eval.path="{held_out}"', 'engine.kv_handoff="on"', *SHORT)
    return drive(folder, train, *sets, watch=slow_satellite, config=QUICKSTART, deadline_s=240)


def test_the_run_makes_four_steps_and_evaluates_before_and_after(short: Driven) -> None:
    assert short.end.exit_code == 0
    steps = short.all(StepReport)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert steps[-1].version_after == sum(step.is_applied for step in steps) >= 1
    assert len(short.all(EvalResult)) == 2


def test_a_satellite_joins_requests_move_and_retention_is_decided(short: Driven) -> None:
    summary = summarise(fold(short.rows))
    assert summary["mid_batch_joins"] >= 1
    assert short.all(MemberJoined)
    assert [one for one in short.all(Continued) if one.reason == "move"]
    assert sum(summary["retention_decisions"].values()) >= 1
    assert summary["tokens_lost"] == 0
    assert summary["harness_errors_from_moves"] == 0


def test_a_turn_goes_on_from_the_bytes_of_another_engine(short: Driven) -> None:
    by_ref: dict[str, list[Handoff]] = {}
    for one in short.all(Handoff):
        by_ref.setdefault(one.ref, []).append(one)
    assert [rows for rows in by_ref.values() if _was_read_and_taken_over(rows)]
    results = {one.promise: one for one in verify_run(open_run_folder(short.end.folder))}
    for promise in ("P6", "P16"):
        assert results[promise].is_kept
        assert results[promise].num_checked > 0


def _was_read_and_taken_over(rows: list[Handoff]) -> bool:
    acknowledged = [one for one in rows if one.stage is HandoffStage.ACKNOWLEDGED]
    return (
        [one.stage for one in rows] == list(HandoffStage)
        and all(one.turn for one in rows)
        and all(one.num_bytes > 0 and one.num_tokens > 0 for one in acknowledged)
    )


def test_no_execution_is_lost_and_the_promises_are_kept(short: Driven) -> None:
    assert f.Outcome.LOST not in short.outcomes().values()
    results = verify_run(open_run_folder(short.end.folder))
    assert not [problem for result in results for problem in result.problems]
    assert all(result.is_kept for result in results)
