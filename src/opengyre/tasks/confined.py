"""What every grader shares: attempts, a fresh view of the workspace, confinement, cleaning.

Owns the order of an attempt. Must not know how a command is confined (it gets a callable), what a
reward is used for, or how a kind asks and reads: its subclass says that. Invariants: the agent is
dead before and never saw the tests; every attempt sees its own copies; a failure of the grader,
of the sandbox or of this machine is no verdict with a reason, never 0 (P12).
"""

import asyncio
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from opengyre.seams.errors import BoundaryError
from opengyre.seams.harness import LaunchResult, LaunchSpec, Limits, RunConfined
from opengyre.seams.tasks import Task, Verdict
from opengyre.tasks.machine import Machine, ShortageError
from opengyre.tasks.workspaces import (
    WorkspaceError,
    copy_tests,
    copy_workspace,
    make_readable,
    remove_tree,
)

TAIL_CHARS = 200
REASON_CHARS = 400

log = logging.getLogger(__name__)


class GradingError(Exception):
    """This attempt gave no verdict; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One attempt's own copies below `folder`: the program may write to the first and the last. The
    name of the tests' folder cannot be known beforehand: a link in the workspace cannot lead
    there."""

    folder: Path
    tests_name: str = field(default_factory=lambda: f"tests-{secrets.token_hex(8)}")

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def tests(self) -> Path:
        return self.folder / self.tests_name

    @property
    def private(self) -> Path:
        return self.folder / "private"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one kind of grader starts; `env` is beside GYRE_WORKSPACE and GYRE_TESTS."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfinedGrader(ABC):
    """Grades by running a program in the sandbox (seams.tasks.Grader).

    `limits.wall_s` holds where the task sets no budget of its own; `num_attempts` bounds the
    tries after a failure of the grader. `read_only_paths` are readable for the program beside its
    view. Nothing is believed while `machine` lacks what an attempt needs of it.
    """

    run: RunConfined
    limits: Limits
    num_attempts: int = 2
    read_only_paths: tuple[Path, ...] = ()
    machine: Machine = field(default_factory=Machine)

    @abstractmethod
    def program(self, view: View) -> Program:
        """What to start in `view`, whose folders exist."""

    @abstractmethod
    def read(self, view: View, result: LaunchResult) -> Verdict:
        """The verdict of a program that exited by itself. Raises GradingError."""

    async def grade(self, task: Task, *, workspace: Path, scratch: Path) -> Verdict:
        reason = "it was never tried"
        for attempt in range(1, self.num_attempts + 1):
            view = View(folder=scratch / f"attempt-{attempt}")
            try:
                return await self._attempt(task, workspace, view)
            except (
                GradingError,
                WorkspaceError,
                ShortageError,
                BoundaryError,
                OSError,
            ) as error:
                words = " ".join(str(error).split())[:REASON_CHARS]
                reason = f"{words} (attempt {attempt} of {self.num_attempts})"
            finally:
                await asyncio.to_thread(_clean, view)
        return Verdict(reward=None, reason=reason)

    async def _attempt(self, task: Task, workspace: Path, view: View) -> Verdict:
        await asyncio.to_thread(_lay_out, task, workspace, view)
        async with self.machine.enough(view.folder):
            result = await self.run(self._spec(task, view))
            if result.exit_code is None:
                raise GradingError(f"the grader ended by {result.ending}: {result.reason}")
            verdict = await asyncio.to_thread(self.read, view, result)
        return verdict

    def _spec(self, task: Task, view: View) -> LaunchSpec:
        program = self.program(view)
        places = {"GYRE_WORKSPACE": str(view.workspace), "GYRE_TESTS": str(view.tests)}
        return LaunchSpec(
            execution=f"grader of {task.name}",
            argv=program.argv,
            workspace=view.workspace,
            private_tmp=view.private,
            env={**places, **program.env},
            read_only_paths=(view.tests, *self.read_only_paths),
            limits=replace(self.limits, wall_s=task.grader_wall_s or self.limits.wall_s),
        )


def checked_reward(raw: object, where: str) -> float:
    """`raw` as a reward. Raises GradingError unless it is a number from 0 to 1."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise GradingError(f"{where}: the reward is {str(raw)[:40]!r}, expected a number")
    if not 0 <= raw <= 1:
        raise GradingError(f"{where}: the reward is out of range, expected 0 to 1")
    return float(raw)


def last_words(result: LaunchResult) -> str:
    """How it ended and the end of what it printed, on one line."""
    return f"{result.reason}: {' '.join(result.output_tail.split())[-TAIL_CHARS:]}"


def _clean(view: View) -> None:
    try:
        remove_tree(view.folder)
    except OSError as error:
        log.warning("%s: left behind after grading: %s", view.folder, error)


def _lay_out(task: Task, workspace: Path, view: View) -> None:
    """Copies of workspace and tests; links stay links, pipes and sockets are left out."""
    view.private.mkdir(parents=True)
    if os.geteuid() != 0:
        make_readable(workspace)
    copy_tests(task.tests, view.tests)
    copy_workspace(workspace, view.workspace)
