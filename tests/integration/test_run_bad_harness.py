"""Agent programs that crash, hang, flood or never call cost their own execution alone."""

from pathlib import Path

import pytest
from run_rig import drive, make_trails

from opengyre.control import facts as f
from opengyre.store.observations import LaunchRecorded, StepReport
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(120)

PROGRAM = """\
url="{base_url}"
number="${url##*/e}"
number="${number%%/*}"
case $((10#$number % 4)) in
0) exit 7 ;;
1) sleep 1000 & wait ;;
2) yes ;;
3) exit 0 ;;
esac
"""
OUTCOMES = [
    f.Outcome.FAILED,
    f.Outcome.TIMED_OUT,
    f.Outcome.FAILED,
    f.Outcome.COMPLETED,
]


def test_each_misbehaving_harness_costs_its_own_execution_only(tmp_path: Path) -> None:
    trails = make_trails(tmp_path / "trails", 4)
    driven = drive(
        tmp_path,
        trails,
        'harness.profile="command"',
        f"harness.command=['/bin/bash', '-c', '''{PROGRAM}''']",
        "harness.timeout_s=2",
        "harness.limits.output_bytes=100000",
        "run.num_steps=2",
        "schedule.run_ahead=0",
    )
    assert driven.end.exit_code == 0
    outcomes = driven.outcomes()
    assert len(outcomes) == 32
    for execution, outcome in outcomes.items():
        assert outcome is OUTCOMES[int(execution[1:]) % 4]
    rewards = {fact.reward for fact in driven.all(f.VerdictGiven)}
    assert rewards == {0.0}
    assert [step.is_applied for step in driven.all(StepReport)] == [False, False]
    assert all(result.is_kept for result in verify_run(open_run_folder(driven.end.folder)))


def test_a_program_that_cannot_be_started_is_launched_twice_and_then_lost(tmp_path: Path) -> None:
    trails = make_trails(tmp_path / "trails", 2)
    driven = drive(
        tmp_path,
        trails,
        'harness.profile="command"',
        "harness.command=['/nonexistent/agent']",
        "run.num_steps=1",
        "schedule.run_ahead=0",
        "schedule.steps_per_burst=1",
    )
    launches: dict[str, list[int]] = {}
    for one in driven.all(LaunchRecorded):
        launches.setdefault(one.execution, []).append(one.launch_number)
    assert len(launches) == 16
    assert set(map(tuple, launches.values())) == {(1, 2)}
    assert set(driven.outcomes().values()) == {f.Outcome.LOST}
    assert {fact.reward for fact in driven.all(f.VerdictGiven)} == {None}
