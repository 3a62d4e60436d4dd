"""Task folders in Harbor's format: read and checked.

    task.toml               [agent] timeout_sec, [verifier] timeout_sec; other keys are left alone
    instruction.md          what the agent is told
    environment/workspace/  what its workspace starts with (may be missing: an empty one)
    tests/                  what the grader needs and the agent never sees: for kind "harbor"
                            test.sh, for "pytest" its test files, for the others anything

Owns reading these folders. Must not know executions, sandboxes, rewards. Invariants: a folder
is either a whole task or a ConfigError of one line; nothing in it leads outside of it.
"""

import hashlib
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opengyre.seams.errors import ConfigError
from opengyre.seams.tasks import GraderKind, Task

TASK_FILE = "task.toml"
INSTRUCTION_FILE = "instruction.md"
WORKSPACE_FOLDER = "environment/workspace"
TESTS_FOLDER = "tests"
TEST_SCRIPT = "tests/test.sh"
TEST_FILES = ("test_*.py", "*_test.py")
MAX_INSTRUCTION_BYTES = 1 << 20
MAX_TASK_FILES = 100_000
MAX_TASKS = 1_000_000
MAX_TIMEOUT_S = 1e9


def load_tasks(path: Path, *, kind: GraderKind = GraderKind.HARBOR) -> tuple[Task, ...]:
    """The task at `path`, or the tasks in its folders, by name. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; expected a task or a folder of tasks")
    if (path / TASK_FILE).is_file():
        return (load_task(path, kind=kind),)
    folders = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    folders = [folder for folder in folders if folder.is_dir()]
    for folder in folders:
        if folder.is_symlink() and not folder.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"{folder}: leads outside of {path}; put the task itself there")
    if not folders:
        raise ConfigError(f"{path}: holds no task; expected {TASK_FILE} here or in its folders")
    if len(folders) > MAX_TASKS:
        raise ConfigError(f"{path}: holds more than {MAX_TASKS} folders; split the set")
    return tuple(load_task(folder, kind=kind) for folder in folders)


def load_task(folder: Path, *, kind: GraderKind = GraderKind.HARBOR) -> Task:
    """One task, with what a grader of this kind needs. Raises ConfigError naming the folder, what
    was expected and what to do."""
    _require_file(folder, TASK_FILE, "add it; an empty one will do")
    _require_file(folder, INSTRUCTION_FILE, "add the text the agent is told")
    _require_tests(folder, kind)
    settings = _read_settings(folder / TASK_FILE)
    instruction = _read_instruction(folder / INSTRUCTION_FILE)
    workspace = folder / WORKSPACE_FOLDER
    if workspace.exists() and not workspace.is_dir():
        raise ConfigError(f"{workspace}: expected a folder with the files of the workspace")
    return Task(
        name=folder.name,
        folder=folder.resolve(),
        instruction=instruction,
        workspace=workspace.resolve() if workspace.is_dir() else None,
        tests=(folder / TESTS_FOLDER).resolve(),
        content_hash=_content_hash(folder, instruction),
        agent_wall_s=_timeout(folder, settings, "agent"),
        grader_wall_s=_timeout(folder, settings, "verifier"),
    )


def _require_tests(folder: Path, kind: GraderKind) -> None:
    tests = folder / TESTS_FOLDER
    if kind is GraderKind.HARBOR:
        _require_file(folder, TEST_SCRIPT, "add the script that writes the reward")
    elif kind is GraderKind.PYTEST and not any(
        path.is_file() for name in TEST_FILES for path in tests.rglob(name)
    ):
        what = f"no {' or '.join(TEST_FILES)} below {TESTS_FOLDER}"
        raise ConfigError(f"{folder}: {what}; add the tests, or remove the folder")
    elif tests.exists() and not tests.is_dir():
        raise ConfigError(f"{tests}: expected a folder with what the grader needs")


def _require_file(folder: Path, name: str, advice: str) -> None:
    if (folder / name).is_symlink():
        raise ConfigError(f"{folder}: {name} is a link; put the file itself there")
    if not (folder / name).is_file():
        raise ConfigError(f"{folder}: {name} is missing; {advice}, or remove the folder")


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected TOML in UTF-8: {error}; correct it") from error


def _read_instruction(path: Path) -> str:
    if path.stat().st_size > MAX_INSTRUCTION_BYTES:
        raise ConfigError(f"{path}: expected at most {MAX_INSTRUCTION_BYTES} bytes; shorten it")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8: {error}; correct it") from error
    if not text.strip():
        raise ConfigError(f"{path}: is empty; write what the agent is told")
    return text


def _timeout(folder: Path, settings: dict[str, Any], part: str) -> float | None:
    table = settings.get(part, {})
    value = table.get("timeout_sec") if isinstance(table, dict) else table
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_TIMEOUT_S:
        what = f"{part}.timeout_sec is {repr(value)[:40]}; expected seconds above 0"
        raise ConfigError(f"{folder / TASK_FILE}: {what}, at most {MAX_TIMEOUT_S:g}; correct it")
    return float(value)


def _content_hash(folder: Path, instruction: str) -> str:
    """Over instruction, workspace and tests: names, kinds, execute bits and bytes."""
    digest = hashlib.sha256()
    _add(digest, b"instruction", instruction.encode())
    for part in (WORKSPACE_FOLDER, TESTS_FOLDER):
        for path in _members(folder, folder / part):
            name = path.relative_to(folder).as_posix().encode()
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                _add(digest, name + b"@", os.readlink(path).encode())
            elif stat.S_ISREG(mode):
                _add(digest, name + (b"*" if mode & stat.S_IXUSR else b""), path.read_bytes())
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: bytes, body: bytes) -> None:
    digest.update(b"%d:%b%d:" % (len(name), name, len(body)))
    digest.update(body)


def _members(folder: Path, part: Path) -> Iterator[Path]:
    """Everything below `part`, in order of names; refuses what leads out or is no file."""
    root = folder.resolve()
    if part.exists() and not part.resolve().is_relative_to(root):
        raise ConfigError(f"{part}: leads outside of its task; put a real folder there")
    num_files = 0
    for here, folders, files in os.walk(part):
        folders.sort()
        for name in sorted(folders + files):
            num_files += 1
            if num_files > MAX_TASK_FILES:
                raise ConfigError(
                    f"{part}: expected at most {MAX_TASK_FILES} files; make it smaller"
                )
            path = Path(here, name)
            _require_plain(path, part.resolve())
            yield path


def _require_plain(path: Path, part: Path) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        target = os.readlink(path)
        if os.path.isabs(target) or not path.resolve().is_relative_to(part):
            what = f"the link leads to {target}, outside of its folder"
            raise ConfigError(f"{path}: {what}; copy the file there instead")
    elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"{path}: expected files, folders and links only; remove it")
