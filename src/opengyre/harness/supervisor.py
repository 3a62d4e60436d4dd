"""One launch, watched from outside: start it confined, bound it, leave nothing of it behind.

A supervisor is a forked process per launch. It owns the launch's process tree (it is the
subreaper, so daemons come back to it), its output and its limits. Must not know deadlines: the
controller's side asks it to stop. Standard library only. Invariants: exactly one report is sent,
after the last process of the tree was reaped; when the controller's end closes, the tree dies.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from opengyre.harness import process_tree
from opengyre.harness.confine import (
    Confinement,
    confine_self,
    is_task_bound_kept,
    num_tasks_now,
)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LENGTH = struct.Struct("=I")
MAX_ORDER_BYTES = 8 << 20
TAIL_BYTES = 16 << 10
READ_BYTES = 1 << 16
CHECK_EVERY_S = 0.5
GLANCE_EVERY_S = 0.05
END_TREE_S = 10.0
STOP = b"S"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to start. Paths are strings; it travels as JSON."""

    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str
    owned_paths: tuple[str, ...]
    confinement: Confinement
    output_bytes: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How it ended: `ending` is a word of seams.harness.Ending, or "stopped" if it was asked to."""

    ending: str
    exit_code: int | None = None
    signal: int | None = None
    output_tail: str = ""
    num_output_bytes: int = 0
    reason: str = ""


def order_from_json(text: bytes) -> Order:
    """The inverse of json.dumps(dataclasses.asdict(order)). Raises ValueError, TypeError."""
    raw: dict[str, Any] = json.loads(text)
    how: dict[str, Any] = raw.pop("confinement")
    for name in ("read_paths", "write_paths", "connect_ports"):
        how[name] = tuple(how[name])
    raw["argv"], raw["owned_paths"] = tuple(raw["argv"]), tuple(raw["owned_paths"])
    return Order(confinement=Confinement(**how), **raw)


def become_subreaper() -> None:
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def supervise(channel: socket.socket) -> None:
    """Read the order from `channel`, run it to its end, answer with the report as JSON."""
    become_subreaper()
    order = _read_order(channel)
    if order is None:
        return
    if not is_task_bound_kept(order.confinement.uid):
        _stay_ahead()
    try:
        report = _start_and_watch(order, channel)
    except OSError as error:
        report = Report(ending="not_started", reason=f"could not start: {error}")
    body = json.dumps({name: getattr(report, name) for name in Report.__slots__}).encode()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.sendall(LENGTH.pack(len(body)) + body)


def _stay_ahead() -> None:
    """Run before all ordinary processes, so that a fork bomb cannot keep us from ending it."""
    priority = os.sched_param(1)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, priority)


def _read_order(channel: socket.socket) -> Order | None:
    """None when the controller's side closed, or sent what is no order."""
    with channel.makefile("rb") as stream:
        header = stream.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        (num_bytes,) = LENGTH.unpack(header)
        body = stream.read(num_bytes) if num_bytes <= MAX_ORDER_BYTES else b""
    return order_from_json(body) if body else None


def _start_and_watch(order: Order, channel: socket.socket) -> Report:
    if order.confinement.uid is not None:
        for path in order.owned_paths:
            _give_tree(path, order.confinement.uid)
    output, output_in = os.pipe()
    failure, failure_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_program(order, output_in, failure_in)
    os.close(output_in)
    os.close(failure_in)
    with os.fdopen(failure, "rb") as stream:
        words = stream.read(1000).decode(errors="replace")
    if words:
        os.waitpid(pid, 0)
        return Report(ending="not_started", reason=words)
    return _Watch(order=order, channel=channel, pid=pid, output=output).run()


def _give_tree(path: str, uid: int) -> None:
    """Everything below `path` belongs to `uid`; links are not followed."""
    os.chown(path, uid, uid, follow_symlinks=False)
    for _, folders, files, here in os.fwalk(path, follow_symlinks=False):
        for name in folders + files:
            os.chown(name, uid, uid, dir_fd=here, follow_symlinks=False)


def _become_program(order: Order, output: int, failure: int) -> NoReturn:
    """In the child: confine, then exec. Never returns; a failure is told in words."""
    supervisor = os.getppid()
    try:
        os.setsid()
        nothing = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        kept = os.dup2(failure, 3, inheritable=False)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.umask(0o022)
        os.chdir(order.folder)
        failure = kept
        confine_self(order.confinement)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(127)
        os.execvpe(order.argv[0], order.argv, order.env)
    except OSError as error:
        os.write(failure, f"could not start {order.argv[0]}: {error}".encode()[:1000])
    os._exit(127)


@dataclass(slots=True, kw_only=True)
class _Watch:
    """The loop over one running tree."""

    order: Order
    channel: socket.socket
    pid: int
    output: int
    tail: bytearray = field(default_factory=bytearray)
    num_output_bytes: int = 0
    status: int | None = None
    is_output_open: bool = True
    num_tasks_before: int = field(default_factory=num_tasks_now)
    next_check_s: float = 0.0

    def run(self) -> Report:
        os.set_blocking(self.output, False)
        handle = os.pidfd_open(self.pid)
        poller = select.poll()
        for source in (self.output, self.channel.fileno(), handle):
            poller.register(source, select.POLLIN)
        is_bounded = is_task_bound_kept(self.order.confinement.uid)
        tick_s = CHECK_EVERY_S if is_bounded else GLANCE_EVERY_S
        self.next_check_s = time.monotonic() + CHECK_EVERY_S
        ending, reason = "", ""
        while not ending:
            ready = {source for source, _ in poller.poll(tick_s * 1000)}
            if self.output in ready and not self._read_output():
                poller.unregister(self.output)
            if self._is_check_due(is_bounded=is_bounded):
                ending, reason = self._check_tree()
            if self.num_output_bytes > self.order.output_bytes:
                ending, reason = "output_limit", f"wrote more than {self.order.output_bytes} bytes"
            if self.channel.fileno() in ready:
                ending = "stopped"
            if handle in ready:
                ending = "exited"
        if ending == "stopped":
            self._ask_to_end(handle)
        return self._finish(ending, reason)

    def _read_output(self) -> bool:
        """Take what is there; False at its end."""
        try:
            chunk = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return True
        self.num_output_bytes += len(chunk)
        self.tail += chunk
        del self.tail[:-TAIL_BYTES]
        self.is_output_open = bool(chunk)
        return self.is_output_open

    def _is_check_due(self, *, is_bounded: bool) -> bool:
        """At intervals; at once when the kernel does not bound this tree and tasks pile up."""
        if time.monotonic() >= self.next_check_s:
            return True
        bound = self.num_tasks_before + self.order.confinement.num_processes
        return not is_bounded and num_tasks_now() > bound

    def _check_tree(self) -> tuple[str, str]:
        self.next_check_s = time.monotonic() + CHECK_EVERY_S
        self.num_tasks_before = num_tasks_now()
        members = process_tree.descendants(os.getpid())
        resident_bytes = sum(member.resident_bytes for member in members)
        bound = self.order.confinement.memory_bytes
        if resident_bytes > bound:
            return "memory_limit", f"{resident_bytes} bytes resident, allowed are {bound}"
        allowed = self.order.confinement.num_processes
        if len(members) > allowed:
            return "process_limit", f"{len(members)} processes, allowed are {allowed}"
        return "", ""

    def _ask_to_end(self, handle: int) -> None:
        """SIGTERM to the program's group, and `grace_s` to follow it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        deadline_s = time.monotonic() + self.order.grace_s
        while time.monotonic() < deadline_s and not poller.poll(20):
            self._drain()

    def _drain(self) -> None:
        """Up to a pipe's content; a daemon that still writes cannot keep us here."""
        for _ in range(32):
            before = self.num_output_bytes
            if not self.is_output_open or not self._read_output():
                return
            if self.num_output_bytes == before:
                return

    def _finish(self, ending: str, reason: str) -> Report:
        if ending in ("exited", "stopped"):
            ended, _ = process_tree.reap()
            self.status = ended.get(self.pid)
        is_clean = process_tree.end_children(time.monotonic() + END_TREE_S)
        self._drain()
        exit_code = signal_number = None
        if ending == "exited" and self.status is not None:
            code = os.waitstatus_to_exitcode(self.status)
            exit_code, signal_number = (code, None) if code >= 0 else (None, -code)
            ending = "exited" if code >= 0 else "signalled"
            reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if not is_clean:
            ending, reason = "lost", f"processes were left after {END_TREE_S} s ({reason})"
        return Report(
            ending=ending,
            exit_code=exit_code,
            signal=signal_number,
            output_tail=self.tail.decode(errors="replace"),
            num_output_bytes=self.num_output_bytes,
            reason=reason,
        )
