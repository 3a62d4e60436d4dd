"""The quickstart's own config, shortened: a real model, real gradients, real role changes.

It asserts the mechanism, never the reward.
"""

import os
import signal

import pytest
from quickstart_rig import QUICKSTART, SHORT, make_tasks
from run_rig import Driven, drive, until

from opengyre.control import facts as f
from opengyre.runtime.run import Run
from opengyre.store.observations import Continued, EvalResult, MemberJoined, StepReport
from opengyre.store.run_folder import open_run_folder
from opengyre.views.fold import fold
from opengyre.views.summary import summarise
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(300)
FREEZING = "cell 1 is leaving rollout: freezing"


async def slow_satellite(run: Run) -> None:
    """Stop the first satellite's process, once it has executions, until it has been told to freeze,
    so that it has live requests then, whatever the speed of the machine."""
    await until(lambda: run.told.num_sampled_tokens > 0 and _num_executions(run, "c1") > 0)
    pid = run.processes.pid("c1")
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: FREEZING in run.scheduler.snapshot().waiting_for)
    finally:
        os.kill(pid, signal.SIGCONT)


def _num_executions(run: Run, engine: str) -> int:
    engines = run.scheduler.snapshot().engines
    return next(one.num_used for one in engines if one.engine == engine)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = tmp_path_factory.mktemp("quickstart")
    train = make_tasks(folder / "train", seed=21, num=8)
    held_out = make_tasks(folder / "eval", seed=22, num=4)
    sets = (f'eval.path="{held_out}"', *SHORT)
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


def test_no_execution_is_lost_and_the_promises_are_kept(short: Driven) -> None:
    assert f.Outcome.LOST not in short.outcomes().values()
    results = verify_run(open_run_folder(short.end.folder))
    assert not [problem for result in results for problem in result.problems]
    assert all(result.is_kept for result in results)
