"""The verdict of `tests/test.sh`, in Harbor's format: reward.txt, or "reward" of reward.json.

Owns reading the reward. Must not know attempts or views (see confined.py). Invariants: the agent
never saw the verdict's folder; the reward is read without following links.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from opengyre.seams.harness import LaunchResult
from opengyre.seams.tasks import Verdict
from opengyre.tasks.confined import (
    ConfinedGrader,
    GradingError,
    Program,
    View,
    checked_reward,
    last_words,
)

MAX_REWARD_BYTES = 4096
SHELL = "/bin/bash"
VERIFIER_FOLDER = "verifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptGrader(ConfinedGrader):
    """Runs the task's script; what it exits with does not matter, what it wrote does."""

    def program(self, view: View) -> Program:
        folder = view.private / VERIFIER_FOLDER
        folder.mkdir()
        return Program(
            argv=(SHELL, str(view.tests / "test.sh")), env={"GYRE_VERIFIER_DIR": str(folder)}
        )

    def read(self, view: View, result: LaunchResult) -> Verdict:
        return Verdict(reward=_read_reward(view.private / VERIFIER_FOLDER, result), reason="graded")


def _read_reward(folder: Path, result: LaunchResult) -> float:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise GradingError(f"the verdict's folder is gone: {error.strerror}") from error
    try:
        for name in ("reward.txt", "reward.json"):
            text = _read_plain(name, handle)
            if text is not None:
                return _parsed(text, name)
    finally:
        os.close(handle)
    raise GradingError(f"the grader wrote no reward ({last_words(result)})")


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


def _parsed(text: str, name: str) -> float:
    try:
        raw = json.loads(text)["reward"] if name.endswith(".json") else float(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GradingError(f"{name} holds no reward: {text[:40]!r}") from error
    return checked_reward(raw, name)
