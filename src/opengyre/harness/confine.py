"""The last steps of a launch, in the child: become small, then become the program.

Owns the order of confinement. Must not know sockets or results. Standard library only.
Invariants: limits and Landlock first, then the identity, then the filter, then exec; any step
that fails ends the child before a line of the program runs.
"""

import ctypes
import os
import resource
from dataclasses import dataclass

from opengyre.harness import landlock, seccomp

PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
SECURE_NO_ROOT_LOCKED = 0x23
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = 63
OOM_SCORE = b"500"
TASK_HEADROOM = 1024

SYSTEM_READ_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/alternatives",
    "/etc/bash.bashrc",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/profile",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/terminfo",
    "/dev/random",
    "/dev/urandom",
    "/proc/cpuinfo",
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/sys/kernel/random",
    "/proc/uptime",
    "/proc/version",
)
DEVICE_PATHS = ("/dev/null", "/dev/zero", "/dev/full")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How the child is confined. `abi` 0 means not at all (the user insisted).

    `uid` None keeps the identity; `is_root_dropped` then takes all capabilities from uid 0.
    `connect_ports` are the TCP ports it may reach. Limits: see seams.harness.Limits.
    """

    abi: int
    uid: int | None
    is_root_dropped: bool
    is_filtered: bool
    read_paths: tuple[str, ...]
    write_paths: tuple[str, ...]
    connect_ports: tuple[int, ...]
    memory_bytes: int
    file_size_bytes: int
    num_open_files: int
    num_processes: int


def confine_self(how: Confinement) -> None:
    """Confine the calling process for good. Raises OSError at the first step that fails."""
    _set_limits(how)
    if how.abi:
        rules = landlock.Rules(
            read_paths=SYSTEM_READ_PATHS + how.read_paths,
            write_paths=how.write_paths,
            device_paths=DEVICE_PATHS,
            connect_ports=how.connect_ports,
        )
        landlock.restrict_self(rules, how.abi)
    else:
        landlock.set_no_new_privs()
    _drop_identity(how)
    if how.is_filtered:
        seccomp.install(is_truncate_denied=how.abi < landlock.Abi.TRUNCATE)


def _set_limits(how: Confinement) -> None:
    with open("/proc/self/oom_score_adj", "wb") as file:
        file.write(OOM_SCORE)
    bounds = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, how.memory_bytes),
        (resource.RLIMIT_FSIZE, how.file_size_bytes),
        (resource.RLIMIT_NOFILE, how.num_open_files),
    ]
    num_tasks = _task_bound(how)
    if num_tasks is not None:
        bounds.append((resource.RLIMIT_NPROC, num_tasks))
    for kind, bound in bounds:
        _, ceiling = resource.getrlimit(kind)
        lowered = bound if ceiling == resource.RLIM_INFINITY else min(bound, ceiling)
        resource.setrlimit(kind, (lowered, lowered))


def is_task_bound_kept(uid: int | None) -> bool:
    """Whether the kernel bounds the tasks of a launch: it does not for uid 0."""
    return uid is not None or os.geteuid() != 0


def num_tasks_now() -> int:
    """Threads and processes on this machine."""
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[3].partition(b"/")[2])


def _task_bound(how: Confinement) -> int | None:
    """The kernel counts per user id: exactly ours under an id of its own; else others' tasks
    count too, and what they may still start is left as headroom."""
    if not is_task_bound_kept(how.uid):
        return None
    if how.uid is not None:
        return how.num_processes
    return num_tasks_now() + how.num_processes + TASK_HEADROOM


def _drop_identity(how: Confinement) -> None:
    if how.uid is None and not how.is_root_dropped:
        return
    _prctl(PR_SET_SECUREBITS, SECURE_NO_ROOT_LOCKED)
    for capability in range(LAST_CAPABILITY + 1):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    os.setgroups([])
    if how.uid is not None:
        os.setresgid(how.uid, how.uid, how.uid)
        os.setresuid(how.uid, how.uid, how.uid)
    _clear_capabilities()


def _clear_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if _libc.capset(header, nothing) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"capset: {os.strerror(code)}")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")
