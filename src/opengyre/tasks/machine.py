"""Whether this machine was short of something while an attempt ran, so that nothing it said counts.

Owns looking at the scratch's disk and at the kernel's count of kills for lack of memory. Must not
know graders or verdicts. Invariant: what was short for a moment was short, also if it is there
again when the attempt is over.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


class ShortageError(Exception):
    """What could not write, or was killed, may have failed for that alone; the text says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What must be left for an attempt to be believed; a bound of 0 is never crossed.

    `min_free_inodes` holds where the file system counts them, `vmstat` where the kernel does. The
    kernel counts its kills on the whole machine, those by a memory limit of any container with
    them; what a launch loses by its own limits (an allocation refused, the tree ended by its
    supervisor) is not among them.
    """

    min_free_bytes: int = 32 << 20
    min_free_inodes: int = 1000
    look_every_s: float = 1.0
    vmstat: Path = Path("/proc/vmstat")

    @contextlib.asynccontextmanager
    async def enough(self, folder: Path) -> AsyncIterator[None]:
        """Looks before the body, all along and after it. Raises ShortageError instead of entering
        or leaving it; an error of the body itself comes first."""
        await asyncio.to_thread(self._refuse_full_disk, folder)
        num_kills = self._num_oom_kills()
        watch = asyncio.create_task(self._look_on(folder))
        try:
            yield
        finally:
            shortage = None if watch.cancel() else watch.exception()
        if shortage is not None:
            raise shortage
        await asyncio.to_thread(self._refuse_full_disk, folder)
        if self._num_oom_kills() > num_kills:
            raise ShortageError("this machine ran out of memory while it was graded")

    async def _look_on(self, folder: Path) -> NoReturn:
        """Until it is cancelled, or at the first shortage."""
        while True:
            await asyncio.to_thread(self._refuse_full_disk, folder)
            await asyncio.sleep(self.look_every_s)

    def _refuse_full_disk(self, folder: Path) -> None:
        found = os.statvfs(folder)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < self.min_free_bytes:
            raise ShortageError(f"the disk is full: {free_bytes} bytes were left while grading")
        if found.f_files and found.f_favail < self.min_free_inodes:
            what = f"{found.f_favail} inodes were left while grading"
            raise ShortageError(f"the disk is full: {what}")

    def _num_oom_kills(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            for line in self.vmstat.read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0
