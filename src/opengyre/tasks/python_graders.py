"""Verdicts of Python code: a share of passed tests, or what a function returns.

Owns the order to the driver (see python_driver.py), which runs in the sandbox, and its answer.
Must not know attempts or views (see confined.py). Invariants: the interpreter starts isolated, so
that nothing in the workspace is imported before the driver says so; the answer comes through a
pipe that neither tests nor code under test inherit.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from opengyre.seams.harness import LaunchResult
from opengyre.seams.tasks import Verdict
from opengyre.tasks import python_driver
from opengyre.tasks.confined import (
    ConfinedGrader,
    GradingError,
    Program,
    View,
    checked_reward,
    last_words,
)

PYTEST = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonGrader(ConfinedGrader):
    """`function` (file.py:function or module:function) is called with workspace and tests;
    PYTEST instead of one: the tests are run, and the reward is the share that passed.

    `python` is an interpreter that can be started in the sandbox; `package_paths` are folders of
    packages for this process's version of Python, which `read_only_paths` must make readable.
    """

    python: Path
    package_paths: tuple[Path, ...]
    function: str = PYTEST

    def program(self, view: View) -> Program:
        order = {
            "workspace": str(view.workspace),
            "tests": str(view.tests),
            "package_paths": [str(path) for path in self.package_paths],
            "function": self.function,
            "version": sys.version_info[:2],
        }
        source = Path(python_driver.__file__).read_text(encoding="utf-8")
        return Program(argv=(str(self.python), "-I", "-S", "-c", source, json.dumps(order)))

    def read(self, view: View, result: LaunchResult) -> Verdict:
        lines = result.output_tail.splitlines()
        try:
            answer = json.loads(lines[-1])
            reward, reason = answer["reward"], str(answer["reason"])
        except (IndexError, ValueError, TypeError, KeyError) as error:
            raise GradingError(f"the grader gave no answer ({last_words(result)})") from error
        if reward is None:
            raise GradingError(reason)
        return Verdict(reward=checked_reward(reward, "the function"), reason=f"graded: {reason}")
