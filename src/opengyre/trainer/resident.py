"""How much memory this process holds, as the system counts it, and the most that work added.

Owns: reading the system's counts. Must not know torch, or what memory is held for. Invariant: where
the system does not say, the answer is 0.
"""

import mmap
from pathlib import Path
from typing import Protocol

_SELF = Path("/proc/self")
_PEAK, _RESET_PEAK = "VmHWM:", "5"


def resident_bytes() -> int:
    """Resident set size of this process. Pages that several processes map count in each."""
    try:
        return int((_SELF / "statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


class Meter(Protocol):
    def held_bytes(self) -> int: ...

    def restart(self) -> None:
        """The peak is what is held now."""
        ...

    def peak_bytes(self) -> int:
        """The most that was held since `restart`."""
        ...


class ProcessMeter:
    """Of the whole process; its peak belongs to one user at a time."""

    def held_bytes(self) -> int:
        return resident_bytes()

    def restart(self) -> None:
        try:
            (_SELF / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        except OSError:
            return

    def peak_bytes(self) -> int:
        try:
            lines = (_SELF / "status").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        kib = next((line.split()[1] for line in lines if line.startswith(_PEAK)), "0")
        return int(kib) * 1024


class Growth:
    """The most that pieces of work added, which may overlap: `begin` before, `end` after each."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._num_open = 0
        self._before = 0
        self._most = 0

    def begin(self) -> None:
        if self._num_open == 0:
            self._meter.restart()
            self._before = self._meter.held_bytes()
        self._num_open += 1

    def end(self) -> None:
        self._num_open -= 1
        self._most = max(self._most, self._meter.peak_bytes() - self._before)

    def take(self) -> int:
        """Since the last time; nothing is open."""
        most, self._most, self._num_open = self._most, 0, 0
        return most
