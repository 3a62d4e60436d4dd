"""Starting `gyre` loads little, and setting up says in one line what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ["torch", "transformers", "renderers", "matplotlib", "starlette", "numpy", "pydantic"]


def test_building_the_command_line_imports_nothing_heavy() -> None:
    program = f"""
import json, sys
import opengyre.cli.main
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("is_new_enough", "words"),
    [
        (False, "make: needs Python 3.11 or newer, found as python3.11, python3.12, "),
        (True, "make: python3.11 has no venv module: apt install python3-venv"),
    ],
)
def test_set_up_names_what_the_machine_lacks(
    tmp_path: Path, is_new_enough: bool, words: str
) -> None:
    code = 0 if is_new_enough else 1
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/sh\ncase "$2" in *version_info*) exit {code};; esac\nexit 1\n')
        fake.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", REPOSITORY / "checks" / "venv.sh", tmp_path / "venv"],
        env={"PATH": str(tmp_path)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()
