"""Writes a seeded set of quickstart tasks as Harbor-format folders, the same bytes every time.

    python examples/quickstart/make_tasks.py --seed 1 --num 32 --out tasks/train
    python examples/quickstart/make_tasks.py --seed 2 --num 32 --out tasks/eval --avoid tasks/train

Owns the folders' layout. A task is instruction.md, task.toml, environment/ (workspace/ holds the
agent's first files, Dockerfile puts them into a container) and tests/ (test.sh, and the right
answers, which the agent never sees). tests/test.sh reads GYRE_WORKSPACE and writes
$GYRE_VERIFIER_DIR/reward.txt.

Exit codes: 0 written (or already there, byte for byte), 2 the input was wrong; then nothing is
written.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from families import MAX_OUT_BYTES, Task, draw_tasks

TASK_TOML = """\
version = "1.0"

[metadata]
family = "{family}"
category = "{family}"
difficulty = "easy"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 10.0
"""
DOCKERFILE = """\
FROM debian:12-slim
WORKDIR /app
COPY workspace/ /app/
"""
TEST_SCRIPT = """\
#!/bin/bash
# Score: share of right lines of the file out in place, less half a line for each line too many.
set -u
here=$(cd "$(dirname "$0")" && pwd)
workspace=${GYRE_WORKSPACE:-/app}
verifier=${GYRE_VERIFIER_DIR:-/logs/verifier}
mapfile -t want < "$here/expected"
got=()
if [ -f "$workspace/out" ] && [ ! -L "$workspace/out" ]; then
  mapfile -t got < <(head -c MAX_OUT_BYTES -- "$workspace/out" | tr -d '\\000\\r')
fi
right=0
for i in "${!want[@]}"; do
  read -r line <<< "${got[i]:-}"
  [ "$line" = "${want[i]}" ] && right=$((right + 1))
done
extra=$(( ${#got[@]} > ${#want[@]} ? ${#got[@]} - ${#want[@]} : 0 ))
parts=$(( (2 * right - extra) * 10000 / (2 * ${#want[@]}) ))
[ "$parts" -lt 0 ] && parts=0
mkdir -p "$verifier"
printf '%d.%04d\\n' $((parts / 10000)) $((parts % 10000)) > "$verifier/reward.txt"
""".replace("MAX_OUT_BYTES", str(MAX_OUT_BYTES))


class InputError(Exception):
    """The user's input cannot work; the text is one line."""


def folder_files(task: Task) -> dict[str, tuple[str, bool]]:
    """Path in the task's folder to (text, whether it is executable)."""
    files = {
        "instruction.md": (task.instruction + "\n", False),
        "task.toml": (TASK_TOML.format(family=task.family), False),
        "environment/Dockerfile": (DOCKERFILE, False),
        "tests/test.sh": (TEST_SCRIPT, True),
        "tests/expected": ("".join(f"{value}\n" for value in task.expected), False),
    }
    for path, text in task.files.items():
        files[f"environment/workspace/{path}"] = (text, path in task.executables)
    return files


def fingerprint(folder: Path) -> str:
    """What makes a task this task: its instruction and its workspace's files."""
    digest = hashlib.sha256()
    workspace = folder / "environment" / "workspace"
    for path in [folder / "instruction.md", *sorted(workspace.rglob("*"))]:
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def fingerprints(tasks_folder: Path) -> dict[str, Path]:
    """Fingerprint to folder, for every task folder; raises InputError if there is none."""
    folders = sorted(path.parent for path in tasks_folder.glob("*/instruction.md"))
    if not folders:
        raise InputError(f"--avoid {tasks_folder}: expected task folders with an instruction.md")
    return {fingerprint(folder): folder for folder in folders}


def write_folder(folder: Path, task: Task) -> None:
    for path, (text, is_executable) in folder_files(task).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(0o755 if is_executable else 0o644)


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refuse_overlap(tasks_folder: Path, avoided: list[Path]) -> None:
    """Raise InputError if a task also stands in an avoided folder, or twice in this one."""
    own = [path.parent for path in sorted(tasks_folder.glob("*/instruction.md"))]
    seen = {key: path for folder in avoided for key, path in fingerprints(folder).items()}
    for folder in own:
        twin = seen.setdefault(fingerprint(folder), folder)
        if twin != folder:
            raise InputError(f"task {folder.name} equals {twin}; choose another --seed")


def make_tasks(seed: int, num: int, out: Path, avoided: list[Path]) -> None:
    """Write `num` task folders below `out`, all or none.

    Raises InputError for an odd number, an overlap, or an `out` that holds something else.
    """
    try:
        tasks = draw_tasks(seed, num)
    except ValueError as error:
        raise InputError(f"--num: {error}") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        new = Path(scratch) / "tasks"
        for index, task in enumerate(tasks):
            write_folder(new / f"{index:03d}-{task.family}", task)
        refuse_overlap(new, avoided)
        if out.exists() and any(out.iterdir()):
            if contents(out) != contents(new):
                raise InputError(f"--out {out}: holds other files; remove it or name another")
            return
        shutil.rmtree(out, ignore_errors=True)
        os.replace(new, out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write quickstart task folders.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--num", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--avoid", type=Path, action="append", default=[])
    options = parser.parse_args(argv)
    try:
        make_tasks(options.seed, options.num, options.out, options.avoid)
    except (InputError, OSError) as error:
        sys.stderr.write(f"make_tasks: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
