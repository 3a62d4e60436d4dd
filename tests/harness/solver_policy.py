"""The scripted engine's policy of a run: every other execution solves the example task.

Which one it is in, it reads off the workspace's path in the prompt; group members so differ.
"""

import re

from opengyre.runtime.trying.example_task import SOLUTION
from opengyre.runtime.trying.solver import ScriptedSolver

SOLVES = ScriptedSolver(commands=("ls -l", SOLUTION), thinking="I add them up.")
LOOKS = ScriptedSolver(commands=("ls -l", "cat numbers"), thinking="I do not add them up.")
WORKSPACE = re.compile(r"/e(\d{6})/workspace")


def respond(text: str, seed: int, *, mistake_rate: float = 0.0) -> str:
    """`mistake_rate` is what every policy is told; this one knows none."""
    found = WORKSPACE.search(text)
    is_solving = found is not None and int(found[1]) % 2 == 0
    return (SOLVES if is_solving else LOOKS).respond(text, seed)
