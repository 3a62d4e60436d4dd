"""Tasks and verdicts: the problems of a data set, and what a grader says about a workspace.

Implementations of TaskSource: one or several sets of Harbor folders. Of Grader: a task's script,
a command, tests, a function.
Invariant: a Verdict without a value is never 0 (P12); it carries its reason in words.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class GraderKind(StrEnum):
    """Who says what a workspace is worth."""

    HARBOR = "harbor"
    COMMAND = "command"
    PYTEST = "pytest"
    CALLABLE = "callable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. `name` is unique within its source; `content_hash` (hex) is over instruction,
    workspace and tests, so that the same problem under another name is recognised.

    `workspace` is the folder every execution starts from, None for an empty one; `tests` may be
    missing where the kind of grader needs none. `agent_wall_s`
    and `grader_wall_s` are the task's own budgets, None where it says nothing.
    """

    name: str
    folder: Path
    instruction: str
    workspace: Path | None
    tests: Path
    content_hash: str
    agent_wall_s: float | None = None
    grader_wall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reward` in [0, 1], or None: no verdict, for `reason`."""

    reward: float | None
    reason: str


class TaskSource(Protocol):
    @property
    def num_tasks(self) -> int: ...

    def task_for_group(self, group_index: int) -> Task:
        """The same task for the same index, in every process and after a resume."""
        ...


class Grader(Protocol):
    async def grade(self, task: Task, *, workspace: Path, scratch: Path) -> Verdict:
        """Grade what an execution left in `workspace`; its process tree is dead. `scratch` is an
        existing empty folder for the grader's own files. Never raises for what it grades."""
        ...
