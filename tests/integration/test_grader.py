"""Grading with real scripts in a real sandbox: a value, or no verdict with a reason, never 0."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opengyre.harness.selftest import open_sandbox
from opengyre.seams.harness import Limits
from opengyre.seams.tasks import Task, Verdict
from opengyre.tasks.grader import ScriptGrader
from opengyre.tasks.harbor import load_task

PRAISE = "echo 0.75 > $GYRE_VERIFIER_DIR/reward.txt"


@pytest.fixture
def work_root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gyre-grader-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def make_task(root: Path, script: str, *, settings: str = "") -> Task:
    folder = root / "set" / "task-1"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(settings)
    (folder / "instruction.md").write_text("Write 42 to out.")
    (folder / "tests" / "test.sh").write_text(script)
    (folder / "tests" / "expected").write_text("42\n")
    return load_task(folder)


def grade(root: Path, script: str, *, settings: str = "", wall_s: float = 10.0) -> Verdict:
    """Grade a workspace that holds `out` (42)."""
    workspace, scratch = root / "workspace", root / "scratch"
    for folder in (workspace, scratch):
        folder.mkdir(exist_ok=True)
    (workspace / "out").write_text("42\n")
    task = make_task(root, script, settings=settings)

    async def graded() -> Verdict:
        async with open_sandbox(root) as here:
            limits = Limits(wall_s=wall_s, grace_s=0.1)
            grader = ScriptGrader(run=here.sandbox.run, limits=limits)
            return await grader.grade(task, workspace=workspace, scratch=scratch)

    verdict = asyncio.run(graded())
    assert list(scratch.iterdir()) == []
    return verdict


def test_the_script_sees_workspace_tests_and_verdict_folder(work_root: Path) -> None:
    script = (
        'cd "$GYRE_WORKSPACE" && cmp out "$(dirname "$0")/expected" && '
        'echo 1 > "$GYRE_VERIFIER_DIR/reward.txt"'
    )
    assert grade(work_root, script) == Verdict(reward=1.0, reason="graded")


def test_partial_credit_in_json_counts(work_root: Path) -> None:
    script = """echo '{"reward": 0.25, "lines": 3}' > $GYRE_VERIFIER_DIR/reward.json; exit 1"""
    assert grade(work_root, script).reward == 0.25


def test_zero_is_a_verdict_when_the_grader_says_so(work_root: Path) -> None:
    assert grade(work_root, "echo 0 > $GYRE_VERIFIER_DIR/reward.txt").reward == 0.0


FAILURES = {
    "crash": ("kill -SEGV $$", "signalled"),
    "error": ("echo no pytest here >&2; exit 3", "no pytest here"),
    "syntax": ("if then (", "wrote no reward"),
    "hang": ("sleep 60", "timed_out"),
    "words": ("echo good > $GYRE_VERIFIER_DIR/reward.txt", "holds no reward"),
    "nan": ("echo nan > $GYRE_VERIFIER_DIR/reward.txt", "expected 0 to 1"),
    "json nan": ("""echo '{"reward": NaN}' > $GYRE_VERIFIER_DIR/reward.json""", "0 to 1"),
    "too much": ("echo 1.5 > $GYRE_VERIFIER_DIR/reward.txt", "expected 0 to 1"),
    "true": ("""echo '{"reward": true}' > $GYRE_VERIFIER_DIR/reward.json""", "expected a number"),
    "list": ("echo '[1]' > $GYRE_VERIFIER_DIR/reward.json", "holds no reward"),
    "bomb": ("printf '[%.0s' {1..4000} > $GYRE_VERIFIER_DIR/reward.json", "holds no reward"),
    "giant": ("head -c 9000 /dev/zero > $GYRE_VERIFIER_DIR/reward.txt", "larger than"),
    "link": ("ln -s $GYRE_WORKSPACE/out $GYRE_VERIFIER_DIR/reward.txt", "cannot be read"),
    "twin": (
        "echo 1 > $TMPDIR/a; ln $TMPDIR/a $GYRE_VERIFIER_DIR/reward.txt",
        "not a plain file",
    ),
    "pipe": ("mkfifo $GYRE_VERIFIER_DIR/reward.txt", "not a plain file"),
    "folder": ("mkdir $GYRE_VERIFIER_DIR/reward.txt", "not a plain file"),
    "moved": (
        "rmdir $GYRE_VERIFIER_DIR; ln -s $GYRE_WORKSPACE $GYRE_VERIFIER_DIR",
        "folder is gone",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failing_grader_gives_no_verdict_and_says_why(work_root: Path, kind: str) -> None:
    script, words = FAILURES[kind]
    verdict = grade(work_root, script, wall_s=0.5)
    assert verdict.reward is None
    assert words in verdict.reason
    assert "attempt 2 of 2" in verdict.reason


def test_a_grader_that_fails_once_is_tried_again_on_an_untouched_workspace(
    work_root: Path,
) -> None:
    script = (
        'cd "$GYRE_WORKSPACE"; read -r x < out; echo spoiled > out; '
        'if [ "$x" = spoiled ]; then exit 1; fi; '
        '[ "$(basename "$(dirname "$GYRE_WORKSPACE")")" = attempt-2 ] && ' + PRAISE
    )
    assert grade(work_root, script) == Verdict(reward=0.75, reason="graded")
    assert (work_root / "workspace" / "out").read_text() == "42\n"


def test_the_tasks_own_budget_comes_first(work_root: Path) -> None:
    settings = "[verifier]\ntimeout_sec = 0.3\n"
    verdict = grade(work_root, "sleep 5; " + PRAISE, settings=settings, wall_s=30.0)
    assert verdict.reward is None
    assert "0.3 s" in verdict.reason


def test_a_reward_written_before_the_time_was_over_does_not_count(work_root: Path) -> None:
    assert grade(work_root, PRAISE + "; sleep 30", wall_s=0.5).reward is None


def test_the_grader_reaches_no_network_and_no_other_folder(work_root: Path) -> None:
    (work_root / "other").mkdir()
    (work_root / "other" / "secret").write_text("s")
    script = (
        f"cat {work_root}/other/secret {work_root}/workspace/out && exit; "
        "(exec 3<>/dev/tcp/127.0.0.1/22) 2>&1 | grep -q 'Permission denied' || exit; " + PRAISE
    )
    assert grade(work_root, script).reward == 0.75


def test_what_an_agent_planted_as_links_leads_nowhere(work_root: Path) -> None:
    (work_root / "outside").write_text("secret")
    (work_root / "workspace").mkdir()
    (work_root / "workspace" / "leak").symlink_to(work_root / "outside")
    script = 'cat "$GYRE_WORKSPACE/leak" && exit; [ -L "$GYRE_WORKSPACE/leak" ] && ' + PRAISE
    assert grade(work_root, script).reward == 0.75


def test_a_workspace_too_large_to_copy_gives_no_verdict(work_root: Path) -> None:
    (work_root / "workspace").mkdir()
    with open(work_root / "workspace" / "giant", "wb") as file:
        file.truncate(1 << 40)
    verdict = grade(work_root, PRAISE)
    assert verdict.reward is None
    assert "more than" in verdict.reason


def test_a_folder_the_agent_closed_is_graded_too(work_root: Path) -> None:
    closed = work_root / "workspace" / "closed"
    closed.mkdir(parents=True)
    (closed / "file").write_text("x")
    closed.chmod(0)
    verdict = grade(work_root, "chmod u+rwx $GYRE_WORKSPACE/closed && " + PRAISE)
    assert verdict.reward == 0.75
    assert os.listdir(closed) == ["file"]


def test_a_file_the_agent_closed_is_read_by_the_grader_whoever_it_runs_as(work_root: Path) -> None:
    closed = work_root / "workspace" / "closed"
    closed.mkdir(parents=True)
    (closed / "answer").write_text("x")
    (closed / "answer").chmod(0)
    closed.chmod(0)
    verdict = grade(work_root, "cat $GYRE_WORKSPACE/closed/answer && " + PRAISE)
    assert verdict.reward == 0.75
