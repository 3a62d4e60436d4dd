"""Whole runs whose config says who grades, and what becomes of executions that never started."""

from pathlib import Path

import pytest
from run_rig import Driven, drive, make_trails

from opengyre.control import facts as f

pytestmark = pytest.mark.timeout(120)

SHORT = ("run.num_steps=1", "schedule.run_ahead=0", "schedule.steps_per_burst=1")
FUNCTION = """
def half_if_the_agent_was_here(workspace, tests):
    return 0.5 if workspace.is_dir() and (tests / "test.sh").is_file() else 0.0
"""


def verdicts(driven: Driven) -> list[f.VerdictGiven]:
    return list(driven.all(f.VerdictGiven))


def test_a_function_of_the_config_grades_a_whole_run(tmp_path: Path) -> None:
    trails = make_trails(tmp_path / "trails", 2)
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "my_grading.py").write_text(FUNCTION)
    function = f"{tmp_path}/user/my_grading.py:half_if_the_agent_was_here"
    driven = drive(
        tmp_path, trails, 'grading.kind="callable"', f'grading.function="{function}"', *SHORT
    )
    assert driven.end.exit_code == 0
    found = verdicts(driven)
    assert len(found) == 16
    assert {(one.reward, one.reason) for one in found} == {
        (0.5, "graded: by half_if_the_agent_was_here")
    }


def test_only_by_config_has_an_execution_that_never_started_a_reward(tmp_path: Path) -> None:
    trails = make_trails(tmp_path / "trails", 2)
    driven = drive(
        tmp_path,
        trails,
        'harness.profile="command"',
        "harness.command=['/nonexistent/agent']",
        "grading.placeholder_reward=0.0",
        *SHORT,
    )
    assert set(driven.outcomes().values()) == {f.Outcome.LOST}
    for one in verdicts(driven):
        assert one.reward == 0.0
        assert one.reason.startswith("grading.placeholder_reward, it never started: could not")
