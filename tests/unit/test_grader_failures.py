"""Every way in which grading can fail through no fault of the workspace: a reason, never 0."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opengyre.seams.errors import BoundaryError
from opengyre.seams.harness import Ending, LaunchResult, LaunchSpec, Limits, RunConfined
from opengyre.seams.tasks import Task, Verdict
from opengyre.tasks.command_grader import CommandGrader
from opengyre.tasks.confined import ConfinedGrader
from opengyre.tasks.grader import ScriptGrader
from opengyre.tasks.python_graders import PythonGrader
from opengyre.tasks.workspaces import MAX_DEPTH

LIMITS = Limits(wall_s=1.0)
BIN = Path("/usr/bin/python3")


def ended(ending: Ending, *, exit_code: int | None = None, output: str = "") -> LaunchResult:
    return LaunchResult(
        ending=ending,
        exit_code=exit_code,
        signal=None,
        output_tail=output,
        num_output_bytes=len(output),
        wall_s=0.1,
        reason="as the test says",
    )


def script(run: RunConfined) -> ConfinedGrader:
    return ScriptGrader(run=run, limits=LIMITS)


def command(run: RunConfined) -> ConfinedGrader:
    rewards = {0: 1.0, 1: 0.0}
    return CommandGrader(run=run, limits=LIMITS, command=("true",), exit_rewards=rewards)


def share(run: RunConfined) -> ConfinedGrader:
    return PythonGrader(run=run, limits=LIMITS, python=BIN, package_paths=())


def function(run: RunConfined) -> ConfinedGrader:
    return PythonGrader(run=run, limits=LIMITS, python=BIN, package_paths=(), function="a.py:f")


KINDS = [script, command, share, function]
Make = Callable[[RunConfined], ConfinedGrader]


def grade(grader: ConfinedGrader, root: Path, *, scratch: Path | None = None) -> Verdict:
    for name in ("scratch", "workspace", "task/tests"):
        (root / name).mkdir(parents=True, exist_ok=True)
    task = Task(
        name="one",
        folder=root / "task",
        instruction="",
        workspace=None,
        tests=root / "task" / "tests",
        content_hash="",
    )
    place = scratch or root / "scratch"
    return asyncio.run(grader.grade(task, workspace=root / "workspace", scratch=place))


@pytest.mark.parametrize("ending", [one for one in Ending if one is not Ending.EXITED])
@pytest.mark.parametrize("make", KINDS)
def test_a_launch_that_did_not_exit_by_itself(tmp_path: Path, make: Make, ending: Ending) -> None:
    async def run(spec: LaunchSpec) -> LaunchResult:
        return ended(ending)

    verdict = grade(make(run), tmp_path)
    assert verdict.reward is None
    assert f"ended by {ending}: as the test says (attempt 2 of 2)" in verdict.reason


@pytest.mark.parametrize("error", [BoundaryError("sandbox", "gone", retryable=True), OSError(28)])
@pytest.mark.parametrize("make", KINDS)
def test_a_sandbox_that_cannot_launch(tmp_path: Path, make: Make, error: Exception) -> None:
    async def run(spec: LaunchSpec) -> LaunchResult:
        raise error

    verdict = grade(make(run), tmp_path)
    assert verdict.reward is None
    assert str(error) in verdict.reason


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize("make", [script, share, function])
def test_an_exit_without_an_answer(tmp_path: Path, make: Make, exit_code: int) -> None:
    async def run(spec: LaunchSpec) -> LaunchResult:
        return ended(Ending.EXITED, exit_code=exit_code, output="Traceback")

    verdict = grade(make(run), tmp_path)
    assert verdict.reward is None
    assert "Traceback" in verdict.reason


@pytest.mark.parametrize("output", ["[1]", "{}", '{"reward": "1", "reason": ""}', "1", "{"])
def test_an_answer_that_is_none(tmp_path: Path, output: str) -> None:
    async def run(spec: LaunchSpec) -> LaunchResult:
        return ended(Ending.EXITED, exit_code=0, output=output)

    assert grade(share(run), tmp_path).reward is None


async def praise(spec: LaunchSpec) -> LaunchResult:
    return ended(Ending.EXITED, exit_code=0, output='{"reward": 1.0, "reason": "all"}')


async def blame(spec: LaunchSpec) -> LaunchResult:
    return ended(Ending.EXITED, exit_code=1)


def test_the_rig_can_give_a_verdict(tmp_path: Path) -> None:
    assert grade(share(praise), tmp_path) == Verdict(reward=1.0, reason="graded: all")
    assert grade(command(blame), tmp_path) == Verdict(reward=0.0, reason="graded: exit code 1")


@pytest.mark.parametrize("make", KINDS)
def test_a_scratch_that_cannot_be_written(tmp_path: Path, make: Make) -> None:
    (tmp_path / "file").write_text("")
    verdict = grade(make(praise), tmp_path, scratch=tmp_path / "file")
    assert verdict.reward is None
    assert "Not a directory" in verdict.reason


def test_a_workspace_that_is_too_deep_or_too_large(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.joinpath(*["d"] * (MAX_DEPTH + 2)).mkdir(parents=True)
    assert "nested deeper" in grade(share(praise), tmp_path).reason
    (workspace / "d").rename(tmp_path / "moved")
    with open(workspace / "giant", "wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    verdict = grade(share(praise), tmp_path)
    assert verdict.reward is None
    assert "more than" in verdict.reason


@pytest.mark.parametrize("make", KINDS)
def test_a_workspace_that_is_gone(tmp_path: Path, make: Make) -> None:
    grader = make(praise)
    (tmp_path / "scratch").mkdir()
    task = Task(
        name="one",
        folder=tmp_path,
        instruction="",
        workspace=None,
        tests=tmp_path / "tests",
        content_hash="",
    )
    verdict = asyncio.run(
        grader.grade(task, workspace=tmp_path / "gone", scratch=tmp_path / "scratch")
    )
    assert verdict.reward is None
    assert "No such file" in verdict.reason
