"""A task small enough to try any agent on: add up a file of numbers.

Owns: its text, its files, its grader, its solution (Harbor's layout, see tasks.harbor).
"""

from pathlib import Path

INSTRUCTION = """\
The file `numbers` in the current folder holds one whole number on each line.
Write their sum into a new file `out` in the same folder, and nothing else.
"""
SOLUTION = """\
#!/bin/bash
awk '{ sum += $1 } END { print sum }' numbers > out
"""
TEST = """\
#!/bin/bash
reward=0
[ "$(head -c 100 "$GYRE_WORKSPACE/out" 2>/dev/null)" = 190 ] && reward=1
echo "$reward" > "$GYRE_VERIFIER_DIR/reward.txt"
"""
NUMBERS = (17, 25, 4, 60, 84)
SOLUTION_SCRIPT = "solution/solve.sh"


def write_example_task(folder: Path) -> Path:
    """Make the new folder `folder` a task; returns it."""
    files = {
        "task.toml": "",
        "instruction.md": INSTRUCTION,
        "environment/workspace/numbers": "".join(f"{number}\n" for number in NUMBERS),
        SOLUTION_SCRIPT: SOLUTION,
        "tests/test.sh": TEST,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def solution_of(task_folder: Path) -> str | None:
    """The text of a task's own solution, None if it has none."""
    script = task_folder / SOLUTION_SCRIPT
    if not script.is_file():
        return None
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#!")).strip()
