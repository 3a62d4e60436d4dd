"""The verdict of a command's exit code.

Owns the way from code to reward. Must not know attempts or views (see confined.py). Invariant: a
code that config gives no reward is no verdict, so a shell that does not find its program (127)
or a program that a signal ended is never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from opengyre.seams.harness import LaunchResult
from opengyre.seams.tasks import Verdict
from opengyre.tasks.confined import ConfinedGrader, GradingError, Program, View, last_words


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandGrader(ConfinedGrader):
    """Runs `command` in the workspace's copy; {workspace} and {tests} in it become the folders."""

    command: tuple[str, ...]
    exit_rewards: Mapping[int, float]

    def program(self, view: View) -> Program:
        places = {"{workspace}": str(view.workspace), "{tests}": str(view.tests)}
        argv = []
        for word in self.command:
            for mark, place in places.items():
                word = word.replace(mark, place)
            argv.append(word)
        return Program(argv=tuple(argv))

    def read(self, view: View, result: LaunchResult) -> Verdict:
        code = result.exit_code
        if code is None or code not in self.exit_rewards:
            raise GradingError(f"the grader's exit code has no reward ({last_words(result)})")
        return Verdict(reward=self.exit_rewards[code], reason=f"graded: exit code {code}")
