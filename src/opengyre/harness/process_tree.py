"""The descendants of a process: count them, weigh them, end them all.

Owns walking /proc and killing by pidfd. Must not know launches. Standard library only.
Invariant: `end_children` returns only when the caller, a subreaper, has no child left; a process
that forks while it is hunted is stopped first, so it cannot outrun the hunt.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
HUNT_PAUSE_S = 0.002
_HAS_CHILDREN_FILE = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """`started` (clock ticks since boot) tells a process from a later one with its number."""

    pid: int
    parent: int
    started: int
    resident_bytes: int
    is_zombie: bool


def read_member(pid: int) -> Member | None:
    """The process as /proc shows it now, None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Member(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        is_zombie=fields[0] == b"Z",
    )


def descendants(root: int) -> list[Member]:
    """All living descendants of `root`, nearest first; zombies are left out."""
    children_of = _children_from_file if _HAS_CHILDREN_FILE else _children_by_scan()
    found: list[Member] = []
    queue = list(children_of(root))
    for pid in queue:
        member = read_member(pid)
        if member is None:
            continue
        queue.extend(children_of(pid))
        if not member.is_zombie:
            found.append(member)
    return found


def _children_from_file(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children.extend(int(child) for child in file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return children


def _children_by_scan() -> Callable[[int], list[int]]:
    by_parent: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        member = read_member(int(name)) if name.isdigit() else None
        if member is not None:
            by_parent.setdefault(member.parent, []).append(member.pid)
    return lambda pid: by_parent.get(pid, [])


def send(member: Member, number: signal.Signals) -> None:
    """Signal exactly this process, never a later one that got its number."""
    try:
        handle = os.pidfd_open(member.pid)
    except ProcessLookupError:
        return
    try:
        now = read_member(member.pid)
        if now is not None and now.started == member.started:
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def reap() -> tuple[dict[int, int], bool]:
    """Collect ended children: {pid: wait status}, and whether any child is left."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = status


def end_children(deadline_s: float) -> bool:
    """Kill everything below this process and reap it; False if `deadline_s` (monotonic) passed
    first. Stop, look again, and only then kill: nothing escapes by forking."""
    while True:
        _, has_children = reap()
        if not has_children:
            return True
        if time.monotonic() > deadline_s:
            return False
        stopped: set[int] = set()
        while fresh := [found for found in descendants(os.getpid()) if found.pid not in stopped]:
            for member in fresh:
                send(member, signal.SIGSTOP)
                stopped.add(member.pid)
        for member in descendants(os.getpid()):
            send(member, signal.SIGKILL)
        time.sleep(HUNT_PAUSE_S)
