"""Places outside the run folder are gone after a run, whatever ended it."""

import os
import subprocess
from pathlib import Path

from opengyre.runtime.folders import meeting_places, remove_orphans


def test_the_folders_exist_while_the_run_lasts() -> None:
    with meeting_places() as folders:
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_folders_of_a_dead_owner_are_removed_and_those_of_a_living_one_kept(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    orphan, living = tmp_path / f"gyre-{dead.pid}-a", tmp_path / f"gyre-{os.getpid()}-b"
    for folder in (orphan, living):
        (folder / "inside").mkdir(parents=True)
    remove_orphans(tmp_path)
    assert not orphan.exists()
    assert living.exists()
