"""Exit codes as verdicts, from real commands in the sandbox."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from opengyre.config.grading import GradingConfig
from opengyre.runtime.grading import grader_of
from opengyre.seams.harness import Limits
from opengyre.seams.tasks import GraderKind, Verdict
from tests.integration.grader_rig import grade_by, make_task, new_root, write

COMPARE = ("cmp", "{workspace}/out", "{tests}/expected")


@pytest.fixture
def work_root() -> Iterator[Path]:
    folder = new_root()
    yield folder
    shutil.rmtree(folder)


def grade(
    root: Path, command: tuple[str, ...], *, out: str = "42\n", rewards: dict[int, float] | None
) -> Verdict:
    settings = GradingConfig(kind="command", command=command, timeout_s=30.0)
    if rewards is not None:
        settings = settings.model_copy(update={"exit_rewards": rewards})
    write(root / "workspace", {"out": out})
    task = make_task(root, {"expected": "42\n"}, kind=GraderKind.COMMAND)
    return grade_by(lambda here: grader_of(settings, here, limits=Limits(grace_s=0.1)), root, task)


@pytest.mark.parametrize(("out", "reward"), [("42\n", 1.0), ("41\n", 0.0)])
def test_success_is_one_and_failure_is_zero(work_root: Path, out: str, reward: float) -> None:
    verdict = grade(work_root, COMPARE, out=out, rewards=None)
    assert verdict == Verdict(reward=reward, reason=f"graded: exit code {1 - int(reward)}")


def test_codes_may_be_partial_credit(work_root: Path) -> None:
    verdict = grade(work_root, ("/bin/sh", "-c", "exit 7"), rewards={0: 1.0, 7: 0.25})
    assert verdict.reward == 0.25


NO_VERDICT = {
    "a code without reward": (("/bin/sh", "-c", "echo disk is full; exit 2"), "disk is full"),
    "no such program": (("/nowhere/check",), "not_started"),
    "no such program in a shell": (("/bin/sh", "-c", "nowhere"), "exit code 127"),
    "a missing file of the tests": (("/bin/bash", "{tests}/gone.sh"), "exit code 127"),
    "killed": (("/bin/sh", "-c", "kill -9 $$"), "signal 9"),
    "the output is a flood": (("/usr/bin/yes",), "output_limit"),
}


@pytest.mark.parametrize("what", NO_VERDICT)
def test_a_command_that_could_not_tell_is_no_verdict(work_root: Path, what: str) -> None:
    command, words = NO_VERDICT[what]
    verdict = grade(work_root, command, rewards=None)
    assert verdict.reward is None
    assert words in verdict.reason


def test_tests_that_their_owner_alone_may_read_are_read(work_root: Path) -> None:
    task = make_task(work_root, {"deep/expected": "1\n"}, kind=GraderKind.COMMAND)
    (task.tests / "deep" / "expected").chmod(0o600)
    (task.tests / "deep").chmod(0o700)
    settings = GradingConfig(kind="command", command=("cmp", "out", "{tests}/deep/expected"))
    write(work_root / "workspace", {"out": "1\n"})
    verdict = grade_by(
        lambda here: grader_of(settings, here, limits=Limits(grace_s=0.1)), work_root, task
    )
    assert verdict.reward == 1.0


@pytest.mark.parametrize("link", ["../tests/expected", "../tests"])
def test_a_link_in_the_workspace_does_not_lead_into_the_tests(work_root: Path, link: str) -> None:
    settings = GradingConfig(kind="command", command=COMPARE, exit_rewards={0: 1, 1: 0, 2: 0})
    (work_root / "workspace").mkdir()
    (work_root / "workspace" / "out").symlink_to(link)
    task = make_task(work_root, {"expected": "42\n"}, kind=GraderKind.COMMAND)
    run = lambda here: grader_of(settings, here, limits=Limits(grace_s=0.1))  # noqa: E731
    assert grade_by(run, work_root, task).reward == 0
