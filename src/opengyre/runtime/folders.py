"""Short-lived places outside the run folder: sockets (short paths), shared memory, workspaces.

Invariant: all are gone when the run ends; what a killed run left behind goes when the next one
starts, since each folder's name holds the pid of its owner.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_OWNED = re.compile(r"gyre-(\d+)-")


@contextmanager
def meeting_places() -> Iterator[tuple[Path, Path, Path]]:
    """(sockets, shared memory, workspaces); on disk where there is no /dev/shm."""
    temporary = Path(tempfile.gettempdir())
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else temporary
    for base in {temporary, memory}:
        remove_orphans(base)
    sockets, planes, work = (_own_folder(base) for base in (temporary, memory, temporary))
    work.chmod(0o711)
    try:
        yield sockets, planes, work
    finally:
        for folder in (sockets, planes, work):
            shutil.rmtree(folder, ignore_errors=True)


def remove_orphans(base: Path) -> None:
    """Remove folders in `base` whose owner is no living process of ours."""
    for folder in base.glob("gyre-*-*"):
        owner = _OWNED.match(folder.name)
        if owner is None or Path("/proc", owner.group(1)).exists():
            continue
        if folder.stat().st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)


def _own_folder(base: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"gyre-{os.getpid()}-", dir=base))
