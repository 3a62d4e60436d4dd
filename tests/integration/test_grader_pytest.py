"""The share of passed tests, whatever the workspace holds or does."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opengyre.config.grading import GradingConfig
from opengyre.harness.selftest import OpenSandbox
from opengyre.runtime.grading import grader_files, grader_of
from opengyre.seams.harness import Limits
from opengyre.seams.tasks import Grader, GraderKind, Verdict
from opengyre.tasks.python_graders import PythonGrader
from tests.integration.grader_rig import Files, grade_by, make_task, new_root, write

SETTINGS = GradingConfig(kind="pytest", timeout_s=60.0)
TWO_TESTS = """
from solution import add

def test_small():
    assert add(1, 2) == 3

def test_negative():
    assert add(-1, -2) == -3
"""
RIGHT = "def add(a, b):\n    return a + b\n"
HALF = "def add(a, b):\n    return abs(a) + abs(b)\n"


@pytest.fixture
def work_root() -> Iterator[Path]:
    folder = new_root()
    yield folder
    shutil.rmtree(folder)


def make(here: OpenSandbox) -> Grader:
    return grader_of(SETTINGS, here, limits=Limits(grace_s=0.1))


def grade(root: Path, tests: Files, workspace: Files) -> Verdict:
    write(root / "workspace", workspace)
    task = make_task(root, tests, kind=GraderKind.PYTEST)
    return grade_by(make, root, task, readable=grader_files(SETTINGS))


def test_the_reward_is_the_share_of_tests_that_passed(work_root: Path) -> None:
    verdict = grade(work_root, {"test_add.py": TWO_TESTS}, {"solution.py": HALF})
    assert verdict == Verdict(reward=0.5, reason="graded: 1 of 2 tests passed")


def test_tests_may_have_neighbours_fixtures_parameters_and_folders(work_root: Path) -> None:
    tests = {
        "conftest.py": "import pytest\n\n@pytest.fixture\ndef three():\n    return 3\n",
        "cases.py": "CASES = [(1, 2), (0, 3), (3, 1)]\n",
        "test_add.py": "import pytest\nfrom cases import CASES\nfrom solution import add\n\n"
        "@pytest.mark.parametrize('case', CASES)\n"
        "def test_three(case, three, tmp_path):\n    assert add(*case) == three\n",
        "deep/add_test.py": "from solution import add\n\nclass TestAdd:\n"
        "    def test_it(self):\n        assert add(1, 1) == 2\n",
    }
    assert grade(work_root, tests, {"solution.py": RIGHT}).reward == 0.75


CRASHES = {
    "exits with 0": "import os\n\ndef add(a, b):\n    if a < 0: os._exit(0)\n    return a + b\n",
    "segfaults": "import os\n\ndef add(a, b):\n    if a < 0: os.kill(os.getpid(), 11)\n"
    "    return a + b\n",
    "leaves the interpreter": "import sys\n\ndef add(a, b):\n    if a < 0: sys.exit(0)\n"
    "    return a + b\n",
    "interrupts": "def add(a, b):\n    if a < 0: raise KeyboardInterrupt\n    return a + b\n",
    "leaves when it is shown": "import sys\n\nclass Sum(int):\n"
    "    def __repr__(self):\n        sys.exit(0)\n\n"
    "def add(a, b):\n    return Sum(abs(a) + abs(b))\n",
    "leaves a daemon": "import os, time\n\ndef add(a, b):\n    if a < 0 and os.fork() == 0:\n"
    "        time.sleep(600)\n    return abs(a) + abs(b)\n",
}


@pytest.mark.parametrize("how", CRASHES)
def test_code_that_ends_the_interpreter_keeps_what_passed_before(work_root: Path, how: str) -> None:
    verdict = grade(work_root, {"test_add.py": TWO_TESTS}, {"solution.py": CRASHES[how]})
    assert verdict.reward == 0.5


BROKEN = {
    "nothing": {},
    "exits": {"solution.py": "import os; os._exit(0)\n"},
    "leaves the interpreter": {"solution.py": RIGHT + "import sys\nsys.exit(0)\n"},
    "interrupts": {"solution.py": RIGHT + "raise KeyboardInterrupt\n"},
    "raises": {"solution.py": "raise RuntimeError('no')\n"},
    "no syntax": {"solution.py": "def add(:\n"},
    "skips": {"solution.py": "import pytest; pytest.skip('no', allow_module_level=True)\n"},
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_module_that_cannot_be_collected_counts_with_the_tests_in_its_text(
    work_root: Path, how: str
) -> None:
    tests = {"test_add.py": TWO_TESTS, "test_other.py": "def test_other():\n    pass\n"}
    assert grade(work_root, tests, BROKEN[how]).reward == pytest.approx(1 / 3)


PASS_ALL = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report

def pytest_collection_modifyitems(items):
    del items[1:]
"""
HOSTILE = {
    "conftest.py": PASS_ALL,
    "sitecustomize.py": "import os; os._exit(0)\n",
    "usercustomize.py": "import os; os._exit(0)\n",
    "pytest.ini": "[pytest]\naddopts = -k small -p evil\npython_functions = none\n",
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-k small"\n',
    "evil.py": PASS_ALL,
    "pytest.py": "raise SystemExit(0)\n",
    "_pytest/__init__.py": "raise SystemExit(0)\n",
    "json.py": "raise SystemExit(0)\n",
    "colorsys.py": "raise SystemExit(0)\n",
    "test_add.py": "def test_free():\n    pass\n",
    "tests/test_add.py": "def test_free():\n    pass\n",
    "evil-1.0.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
    "evil-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
    "solution.py": HALF,
}


def test_what_the_workspace_says_to_pytest_and_python_is_not_heard(work_root: Path) -> None:
    tests = {
        "test_add.py": TWO_TESTS,
        "test_std.py": "import colorsys\n\ndef test_it():\n    pass\n",
    }
    verdict = grade(work_root, tests, HOSTILE)
    assert verdict == Verdict(reward=2 / 3, reason="graded: 2 of 3 tests passed")


def test_settings_beside_the_tests_are_heard(work_root: Path) -> None:
    tests = {
        "pytest.ini": "[pytest]\npython_functions = check_*\n",
        "test_add.py": "def check_it():\n    pass\n\ndef test_it():\n    raise ValueError\n",
    }
    assert grade(work_root, tests, {}).reward == 1.0


def test_the_tests_are_the_tasks_own_and_cannot_be_written(work_root: Path) -> None:
    solution = (
        "import os, pathlib\n"
        "for path in pathlib.Path(os.environ['GYRE_TESTS']).glob('*.py'):\n"
        "    path.write_text('def test_free(): pass')\n"
    )
    verdict = grade(work_root, {"test_add.py": TWO_TESTS}, {"solution.py": solution})
    assert verdict == Verdict(reward=0.0, reason="graded: 0 of 2 tests passed")


FORGER = """
import os, time

if os.fork() == 0:
    os.setsid()
    while True:
        for handle in range(1, 64):
            try:
                os.write(handle, b'\\n{"reward": 1.0, "reason": "all of it"}\\n')
            except OSError:
                pass
        time.sleep(0.001)
time.sleep(0.5)
os._exit(0)
"""


def test_an_answer_that_code_under_test_prints_is_not_read(work_root: Path) -> None:
    verdict = grade(work_root, {"test_add.py": TWO_TESTS}, {"solution.py": FORGER})
    assert verdict.reward != 1.0


NO_VERDICT = {
    "a file without tests": ({"test_none.py": "X = 1\n"}, "no tests were collected"),
    "a broken conftest": (
        {"test_add.py": TWO_TESTS, "conftest.py": "import nowhere\n"},
        "pytest failed at test_add.py",
    ),
    "a conftest that leaves": (
        {"test_add.py": TWO_TESTS, "conftest.py": "import sys\n\nsys.exit('no licence')\n"},
        "conftest.py left the interpreter: no licence",
    ),
    "a conftest that leaves at the start": (
        {
            "test_add.py": TWO_TESTS,
            "conftest.py": "import sys\n\ndef pytest_sessionstart():\n    sys.exit('no licence')\n",
        },
        "pytest failed at test_add.py",
    ),
    "a broken test file": ({"test_add.py": "def test_x(:\n"}, "SyntaxError"),
    "a killed child": (
        {"test_add.py": "import os\n\ndef test_x():\n    os.kill(os.getpid(), 9)\n"},
        "test_add.py were killed",
    ),
}


@pytest.mark.parametrize("what", NO_VERDICT)
def test_what_tells_nothing_about_the_workspace_is_no_verdict(work_root: Path, what: str) -> None:
    tests, words = NO_VERDICT[what]
    verdict = grade(work_root, tests, {"solution.py": RIGHT})
    assert verdict.reward is None
    assert words in verdict.reason
    assert "attempt 2 of 2" in verdict.reason


def test_without_pytest_there_is_no_verdict(work_root: Path) -> None:
    task = make_task(work_root, {"test_add.py": TWO_TESTS}, kind=GraderKind.PYTEST)

    def without_packages(here: OpenSandbox) -> Grader:
        grader = make(here)
        assert isinstance(grader, PythonGrader)
        return replace(grader, package_paths=())

    verdict = grade_by(without_packages, work_root, task)
    assert verdict.reward is None
    assert "pytest cannot be imported" in verdict.reason


def test_tests_that_hang_are_no_verdict_after_the_tasks_own_budget(work_root: Path) -> None:
    write(work_root / "workspace", {"solution.py": "while True:\n    pass\n"})
    task = make_task(
        work_root,
        {"test_add.py": TWO_TESTS},
        kind=GraderKind.PYTEST,
        settings="[verifier]\ntimeout_sec = 1.5\n",
    )
    verdict = grade_by(make, work_root, task, readable=grader_files(SETTINGS))
    assert verdict.reward is None
    assert "ran longer than 1.5 s" in verdict.reason
