"""A small process that forks a supervisor per launch: starting a program costs a fork, not an
interpreter, and never a fork of a process that holds torch.

Owns the supervisors' lifetimes. Must not know what they run. Standard library only. Invariants:
it ends when the controller's end of its socket closes and every supervisor is gone; a process
that lost its supervisor is adopted here (subreaper) and killed.
"""

import gc
import os
import select
import signal
import socket
import time

from opengyre.harness import process_tree
from opengyre.harness.supervisor import become_subreaper, supervise

LAST_WAIT_S = 15.0
FDS_PER_MESSAGE = 1


def serve(door: socket.socket) -> None:
    """Fork a supervisor for every socket that comes through `door`, until it closes."""
    become_subreaper()
    gc.collect()
    gc.freeze()
    wake, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    supervisors: set[int] = set()
    poller = select.poll()
    poller.register(door, select.POLLIN)
    poller.register(wake, select.POLLIN)
    while True:
        ready = {source for source, _ in poller.poll()}
        if wake in ready:
            os.read(wake, 4096)
            _collect(supervisors)
        if door.fileno() in ready and not _fork_one(door, supervisors):
            break
    _await_last(supervisors)


def _fork_one(door: socket.socket, supervisors: set[int]) -> bool:
    """False at the end of `door`."""
    message, handles, _, _ = socket.recv_fds(door, 1, FDS_PER_MESSAGE)
    if not message:
        return False
    pid = os.fork()
    if pid == 0:
        _be_supervisor(door, handles[0])
    supervisors.add(pid)
    os.close(handles[0])
    return True


def _be_supervisor(door: socket.socket, handle: int) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        door.close()
        with socket.socket(fileno=handle) as channel:
            supervise(channel)
        status = 0
    finally:
        os._exit(status)


def _collect(supervisors: set[int]) -> None:
    """Reap; then kill adopted processes, whose supervisor died before them."""
    ended, has_children = process_tree.reap()
    supervisors.difference_update(ended)
    if has_children and any(status != 0 for status in ended.values()):
        _kill_adopted(supervisors)


def _kill_adopted(supervisors: set[int]) -> None:
    own = os.getpid()
    for member in process_tree.descendants(own):
        if member.parent == own and member.pid not in supervisors:
            for below in [member, *process_tree.descendants(member.pid)]:
                process_tree.send(below, signal.SIGKILL)


def _await_last(supervisors: set[int]) -> None:
    """Supervisors end their trees by themselves once their own sockets close."""
    deadline_s = time.monotonic() + LAST_WAIT_S
    while time.monotonic() < deadline_s:
        ended, has_children = process_tree.reap()
        supervisors.difference_update(ended)
        if not has_children:
            return
        if not supervisors:
            break
        time.sleep(0.01)
    process_tree.end_children(time.monotonic() + LAST_WAIT_S)


def main() -> None:
    """The door is standard input."""
    with socket.socket(fileno=os.dup(0)) as door:
        serve(door)
