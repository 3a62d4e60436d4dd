"""How much memory this process holds, as the system counts it."""

from pathlib import Path

_PAGE_BYTES = 4096


def resident_bytes() -> int:
    """Resident set size in bytes (0 where the system does not say)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
