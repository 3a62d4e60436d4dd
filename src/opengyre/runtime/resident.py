"""How much memory processes hold, as the system counts it."""

from pathlib import Path

_PAGE_BYTES = 4096


def resident_bytes(*others: int) -> int:
    """Resident set size of this process and of those with the pids `others`, in bytes (0 where the
    system does not say). Pages that several of them map count in each."""
    return sum(_resident_bytes(name) for name in ("self", *map(str, others)))


def _resident_bytes(name: str) -> int:
    try:
        statm = Path(f"/proc/{name}/statm").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(statm.split()[1]) * _PAGE_BYTES
