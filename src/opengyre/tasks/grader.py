"""The verdict on what an execution left behind: `tests/test.sh` in a fresh view of the workspace.

Owns grading attempts and reading the reward. Must not know how commands are confined (it gets a
callable) or what a reward is used for. Invariants: the agent is dead before and never saw the
tests or the verdict's folder; a failure is no verdict with a reason, never 0 (P12); the reward is
read without following links.
"""

import asyncio
import json
import logging
import math
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from opengyre.seams.errors import BoundaryError
from opengyre.seams.harness import LaunchResult, LaunchSpec, Limits, RunConfined
from opengyre.seams.tasks import Task, Verdict
from opengyre.tasks.workspaces import (
    WorkspaceError,
    copy_workspace,
    open_closed_folders,
    remove_tree,
)

MAX_REWARD_BYTES = 4096
SHELL = "/bin/bash"
TAIL_WORDS = 200

log = logging.getLogger(__name__)


class GradingError(Exception):
    """This attempt gave no verdict; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptGrader:
    """Runs the task's script (seams.tasks.Grader).

    `limits.wall_s` holds where the task sets no budget of its own; `num_attempts` bounds the
    tries after a failure of the grader. `read_only_paths` are readable for the script.
    """

    run: RunConfined
    limits: Limits
    num_attempts: int = 2
    read_only_paths: tuple[Path, ...] = ()

    async def grade(self, task: Task, *, workspace: Path, scratch: Path) -> Verdict:
        reason = "it was never tried"
        for attempt in range(1, self.num_attempts + 1):
            view = scratch / f"attempt-{attempt}"
            try:
                return await self._attempt(task, workspace, view)
            except (GradingError, WorkspaceError, BoundaryError, OSError) as error:
                reason = f"{error} (attempt {attempt} of {self.num_attempts})"
            finally:
                await asyncio.to_thread(_clean, view)
        return Verdict(reward=None, reason=reason)

    async def _attempt(self, task: Task, workspace: Path, view: Path) -> Verdict:
        await asyncio.to_thread(_lay_out_view, task, workspace, view)
        result = await self.run(self._spec(task, view))
        reward = await asyncio.to_thread(_read_reward, view / "private" / "verifier", result)
        return Verdict(reward=reward, reason="graded")

    def _spec(self, task: Task, view: Path) -> LaunchSpec:
        wall_s = task.grader_wall_s or self.limits.wall_s
        limits = {name: getattr(self.limits, name) for name in Limits.__slots__}
        return LaunchSpec(
            execution=f"grader of {task.name}",
            argv=(SHELL, str(view / "tests" / "test.sh")),
            workspace=view / "workspace",
            private_tmp=view / "private",
            env={
                "GYRE_WORKSPACE": str(view / "workspace"),
                "GYRE_VERIFIER_DIR": str(view / "private" / "verifier"),
            },
            read_only_paths=(view / "tests", *self.read_only_paths),
            limits=Limits(**{**limits, "wall_s": wall_s}),
        )


def _clean(view: Path) -> None:
    try:
        remove_tree(view)
    except OSError as error:
        log.warning("%s: left behind after grading: %s", view, error)


def _lay_out_view(task: Task, workspace: Path, view: Path) -> None:
    """Copies of workspace and tests; links stay links, pipes and sockets are left out."""
    (view / "private" / "verifier").mkdir(parents=True)
    if os.geteuid() != 0:
        open_closed_folders(workspace)
    shutil.copytree(task.tests, view / "tests", symlinks=True)
    copy_workspace(workspace, view / "workspace")


def _read_reward(folder: Path, result: LaunchResult) -> float:
    """The number in reward.txt, or "reward" of reward.json. Raises GradingError."""
    if result.exit_code is None:
        raise GradingError(f"the grader ended by {result.ending}: {result.reason}")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise GradingError(f"the verdict's folder is gone: {error.strerror}") from error
    try:
        for name in ("reward.txt", "reward.json"):
            text = _read_plain(name, handle)
            if text is not None:
                return _checked(text, name)
    finally:
        os.close(handle)
    words = " ".join(result.output_tail.split())[-TAIL_WORDS:]
    raise GradingError(f"the grader wrote no reward ({result.reason}): {words}")


def _read_plain(name: str, folder: int) -> str | None:
    """The text of a small regular file that is no link; None if there is nothing."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GradingError(f"{name} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise GradingError(f"{name} is not a plain file")
        body = os.read(handle, MAX_REWARD_BYTES + 1)
    finally:
        os.close(handle)
    if len(body) > MAX_REWARD_BYTES:
        raise GradingError(f"{name} is larger than {MAX_REWARD_BYTES} bytes")
    return body.decode(errors="replace")


def _checked(text: str, name: str) -> float:
    try:
        raw = json.loads(text)["reward"] if name.endswith(".json") else float(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GradingError(f"{name} holds no reward: {text[:40]!r}") from error
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise GradingError(f"{name}: the reward is {str(raw)[:40]!r}, expected a number")
    if not (math.isfinite(raw) and 0 <= raw <= 1):
        raise GradingError(f"{name}: the reward is {raw}, expected 0 to 1")
    return float(raw)
