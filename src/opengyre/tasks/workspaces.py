"""The folders an execution works in: laid out from its task, copied for grading, removed.

Owns file trees that an agent may have shaped. Must not know sandboxes or rewards. Invariants:
links are never followed; a copy is bounded in files and bytes; removal copes with any depth.
"""

import contextlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

from opengyre.seams.tasks import Task

MAX_COPIED_FILES = 200_000
MAX_COPIED_BYTES = 1 << 30
MAX_DEPTH = 200
PROGRAM_S = 60.0


class WorkspaceError(Exception):
    """The tree is too large or too deep to be copied."""


def lay_out_workspace(task: Task, workspace: Path) -> None:
    """Make the folder `workspace` and fill it as `task` says. Raises OSError."""
    workspace.mkdir(parents=True, exist_ok=True)
    if task.workspace is not None:
        shutil.copytree(task.workspace, workspace, symlinks=True, dirs_exist_ok=True)


def copy_workspace(source: Path, target: Path) -> None:
    """Copy a tree to the new folder `target`, readable for its owner; pipes, sockets and devices
    are left out.

    Raises WorkspaceError beyond the bounds, OSError.
    """
    num_files = num_bytes = 0
    base = os.fspath(source).count(os.sep)

    def choose(folder: str, names: list[str]) -> list[str]:
        nonlocal num_files, num_bytes
        found = {name: os.lstat(os.path.join(folder, name)) for name in names}
        num_files += len(found)
        num_bytes += sum(one.st_size for one in found.values())
        if folder.count(os.sep) - base > MAX_DEPTH:
            raise WorkspaceError(f"the workspace's folders are nested deeper than {MAX_DEPTH}")
        if num_files > MAX_COPIED_FILES or num_bytes > MAX_COPIED_BYTES:
            what = f"more than {MAX_COPIED_FILES} files or {MAX_COPIED_BYTES} bytes"
            raise WorkspaceError(f"the workspace has {what}")
        return [name for name, one in found.items() if not _is_copied(one.st_mode)]

    shutil.copytree(source, target, symlinks=True, ignore=choose)
    make_readable(target)


def make_readable(path: Path) -> None:
    """Let the owner read what an agent closed to its own user; nothing else about modes changes.
    Raises OSError."""
    _run("chmod", "-R", "u+rX", "--", str(path))


def copy_tests(source: Path, target: Path) -> None:
    """Copy a task's tests to the new folder `target`, readable under any user id; nothing but the
    folder if the task has none. Raises OSError."""
    if not source.is_dir():
        target.mkdir()
        return
    shutil.copytree(source, target, symlinks=True)
    _run("chmod", "-R", "a+rX", "--", str(target))


def remove_tree(path: Path) -> None:
    """Remove `path` and all below it; nothing happens if it is not there. Raises OSError."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        _run("chmod", "-R", "u+rwX", "--", str(path))
        _run("rm", "-rf", "--one-file-system", "--", str(path))
    if path.exists():
        raise OSError(f"{path} cannot be removed")


def _run(*command: str) -> None:
    """A program that copes with any depth; it is judged by its effect."""
    try:
        subprocess.run(command, timeout=PROGRAM_S, check=False, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took longer than {PROGRAM_S} s") from error


def _is_copied(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
