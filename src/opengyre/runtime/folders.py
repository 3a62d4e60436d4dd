"""Short-lived places outside the run folder: sockets (short paths) and shared memory.

Invariant: all are gone when the run ends, whatever ended it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def meeting_places() -> Iterator[tuple[Path, Path, Path]]:
    """(sockets, shared memory, workspaces); on disk where there is no /dev/shm."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    sockets = Path(tempfile.mkdtemp(prefix="gyre-"))
    planes = Path(tempfile.mkdtemp(prefix="gyre-", dir=base))
    work = Path(tempfile.mkdtemp(prefix="gyre-work-"))
    work.chmod(0o711)
    try:
        yield sockets, planes, work
    finally:
        for folder in (sockets, planes, work):
            shutil.rmtree(folder, ignore_errors=True)
