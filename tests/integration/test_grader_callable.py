"""A function of the user's says what a workspace is worth, in the sandbox."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opengyre.config.grading import GradingConfig
from opengyre.harness.selftest import OpenSandbox
from opengyre.runtime.grading import grader_files, grader_of
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import Limits
from opengyre.seams.tasks import Grader, GraderKind, Verdict
from opengyre.tasks.python_graders import PythonGrader
from tests.integration.grader_rig import Files, grade_by, make_task, new_root, write

FILE = """
import os, subprocess, sys
from pathlib import Path
from grading_neighbour import share

def right_lines(workspace: Path, tests: Path) -> float:
    print("looking")
    return share((workspace / "out").read_text(), (tests / "expected").read_text())

def of_a_program(workspace, tests):
    subprocess.run([sys.executable, "-I", str(workspace / "program.py")], timeout=10)
    return 0.5

def imports_what_is_there(workspace, tests):
    import json
    return json.loads("0.25")

def fails(workspace, tests):
    raise ValueError(f"no {(workspace / 'gone').name}")

def leaves(workspace, tests):
    sys.exit(0)

def ends(workspace, tests):
    os._exit(0)

def sleeps(workspace, tests):
    import time; time.sleep(60)

def writes_outside(workspace, tests):
    (tests / "expected").write_text("")
    return 1.0

RETURNS = {"words": "good", "true": True, "none": None, "nan": float("nan"), "two": 2.0,
           "below": -0.1, "infinite": float("inf"), "list": [1]}

def returns(workspace, tests):
    return RETURNS[(workspace / "what").read_text()]
"""
NEIGHBOUR = """
def share(found, expected):
    pairs = list(zip(found.split(), expected.split()))
    return sum(a == b for a, b in pairs) / len(pairs)
"""


@pytest.fixture
def work_root() -> Iterator[Path]:
    folder = new_root()
    yield folder
    shutil.rmtree(folder)


def grade(
    root: Path, function: str, workspace: Files | None = None, *, timeout_s: float = 30.0
) -> Verdict:
    write(root / "user", {"my_grading.py": FILE, "grading_neighbour.py": NEIGHBOUR})
    write(root / "workspace", workspace or {"out": "1 2 3 5\n"})
    task = make_task(root, {"expected": "1 2 3 4\n"}, kind=GraderKind.CALLABLE)

    def make(here: OpenSandbox) -> Grader:
        """Of this sandbox's launches, without the check that loads the file here."""
        settings = GradingConfig(
            kind="callable",
            function=f"{root}/user/my_grading.py:{function}",
            timeout_s=timeout_s,
        )
        return grader_of(settings, here, limits=Limits(grace_s=0.1))

    return grade_by(make, root, task, readable=(root / "user" / "my_grading.py",))


def test_the_function_gets_workspace_and_tests_and_may_import_its_neighbours(
    work_root: Path,
) -> None:
    verdict = grade(work_root, "right_lines")
    assert verdict == Verdict(reward=0.75, reason="graded: by right_lines")


def test_nothing_of_the_workspace_is_imported(work_root: Path) -> None:
    names = ("json.py", "sitecustomize.py", "usercustomize.py", "grading_neighbour.py")
    hostile = dict.fromkeys(names, "raise SystemExit(0)\n")
    assert grade(work_root, "imports_what_is_there", hostile).reward == 0.25


def test_a_program_that_the_function_starts_cannot_answer_for_it(work_root: Path) -> None:
    program = (
        "import os\n"
        "for handle in range(1, 64):\n"
        "    try:\n"
        '        os.write(handle, b\'\\n{"reward": 1.0, "reason": "all of it"}\\n\')\n'
        "    except OSError:\n"
        "        pass\n"
    )
    verdict = grade(work_root, "of_a_program", {"program.py": program})
    assert verdict == Verdict(reward=0.5, reason="graded: by of_a_program")


NO_VERDICT = {
    "fails": "ValueError: no gone",
    "leaves": "gave no answer (exit code 0",
    "ends": "gave no answer (exit code 0",
    "sleeps": "ran longer than 1.5 s",
    "missing": "has no attribute 'missing'",
    "writes_outside": "PermissionError",
}


@pytest.mark.parametrize("function", NO_VERDICT)
def test_a_function_that_fails_gives_no_verdict_and_says_why(
    work_root: Path, function: str
) -> None:
    verdict = grade(work_root, function, timeout_s=1.5 if function == "sleeps" else 30.0)
    assert verdict.reward is None
    assert NO_VERDICT[function] in verdict.reason


@pytest.mark.parametrize(
    "what", ["words", "true", "none", "nan", "two", "below", "infinite", "list"]
)
def test_what_is_no_reward_is_no_verdict(work_root: Path, what: str) -> None:
    verdict = grade(work_root, "returns", {"what": what})
    assert verdict.reward is None
    assert "expected" in verdict.reason


def test_a_function_of_an_installed_module_is_found(work_root: Path) -> None:
    settings = GradingConfig(kind="callable", function="packaging.version:parse")
    (place,) = grader_files(settings)
    assert place.name == "version.py"
    (work_root / "workspace").mkdir()
    task = make_task(work_root, {}, kind=GraderKind.CALLABLE)

    def make(here: OpenSandbox) -> Grader:
        return grader_of(settings, here, limits=Limits(grace_s=0.1))

    verdict = grade_by(make, work_root, task, readable=(place,))
    assert verdict.reward is None
    assert "takes 1 positional argument" in verdict.reason


def test_a_missing_interpreter_is_no_verdict(work_root: Path) -> None:
    task = make_task(work_root, {}, kind=GraderKind.CALLABLE)

    def make(here: OpenSandbox) -> Grader:
        settings = GradingConfig(kind="callable", function="packaging.version:parse")
        grader = grader_of(settings, here, limits=Limits(grace_s=0.1))
        assert isinstance(grader, PythonGrader)
        return replace(grader, python=Path("/nowhere/python3"))

    verdict = grade_by(make, work_root, task)
    assert verdict.reward is None
    assert "could not start /nowhere/python3" in verdict.reason


@pytest.mark.parametrize(
    ("function", "words"),
    [("nowhere.at_all:f", "cannot be loaded"), ("packaging.version:gone", "has no function gone")],
)
def test_a_function_that_is_not_there_is_refused_before_the_run(function: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grader_files(GradingConfig(kind="callable", function=function))
