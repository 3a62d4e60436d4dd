"""Grading workspaces by real graders in a real sandbox."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from opengyre.harness.selftest import OpenSandbox, open_sandbox
from opengyre.seams.tasks import Grader, GraderKind, Task, Verdict
from opengyre.tasks.harbor import load_task

Files = Mapping[str, str]
MakeGrader = Callable[[OpenSandbox], Grader]


def new_root() -> Path:
    """A folder that launches under an id of their own can reach."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-grader-"))
    folder.chmod(0o755)
    return folder


def write(folder: Path, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def make_task(root: Path, tests: Files, *, kind: GraderKind, settings: str = "") -> Task:
    folder = root / "set" / "task-1"
    write(folder, {"task.toml": settings, "instruction.md": "Write it."})
    write(folder / "tests", tests)
    return load_task(folder, kind=kind)


def grade_by(
    make: MakeGrader, root: Path, task: Task, *, readable: tuple[Path, ...] = ()
) -> Verdict:
    """The verdict about `root`/workspace; nothing of the grader is left after it."""
    workspace, scratch = root / "workspace", root / "scratch"
    for folder in (workspace, scratch):
        folder.mkdir(exist_ok=True)

    async def graded() -> Verdict:
        async with open_sandbox(root, read_only_paths=readable) as here:
            return await make(here).grade(task, workspace=workspace, scratch=scratch)

    verdict = asyncio.run(graded())
    assert list(scratch.iterdir()) == []
    return verdict
