"""A small system-call filter for what Landlock does not cover.

Owns the filter program. Must not know launches. Standard library only. Invariants: the only
sockets a confined process makes are TCP over IPv4 or IPv6 (so Landlock's port rule covers all it
can reach) and unnamed pairs; an unknown machine type gets no filter and says so.
"""

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
RET_ALLOW = 0x7FFF0000
RET_ERRNO = 0x00050000
LOAD_WORD = 0x20
AND = 0x54
JUMP_EQUAL = 0x15
JUMP_GREATER_EQUAL = 0x35
RETURN = 0x06
OFFSET_NUMBER = 0
OFFSET_ARCH = 4
OFFSET_ARGS = 16
AF_INET, AF_INET6 = 2, 10
SOCK_STREAM = 1
SOCK_TYPE_MASK = 0xF
IPPROTO_TCP = 6
X32_BIT = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """System-call numbers of one machine type."""

    audit_arch: int
    socket: int
    clone: int
    truncate: int
    denied: tuple[int, ...]


COMMON_DENIED = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring_*, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr."""
CLONE3 = 435

MACHINES = {
    "x86_64": Machine(
        audit_arch=0xC000003E,
        socket=41,
        clone=56,
        truncate=76,
        denied=(*COMMON_DENIED, 165, 166, 155, 161, 248, 249, 250, 272, 308, 298, 304, 321, 323),
    ),
    "aarch64": Machine(
        audit_arch=0xC00000B7,
        socket=198,
        clone=220,
        truncate=45,
        denied=(*COMMON_DENIED, 40, 39, 41, 51, 217, 218, 219, 97, 268, 241, 265, 280, 282),
    ),
}
"""`denied` after the common ones: mount, umount2, pivot_root, chroot, add_key, request_key,
keyctl, unshare, setns, perf_event_open, open_by_handle_at, bpf, userfaultfd."""

Instruction = tuple[int, int, int, int]


def is_supported() -> bool:
    return platform.machine() in MACHINES


def install(*, is_truncate_denied: bool) -> None:
    """Filter this process and all it starts, for good. Needs no_new_privs. Raises OSError.

    `is_truncate_denied` covers kernels whose Landlock does not know truncation by path.
    """
    machine = MACHINES[platform.machine()]
    program = _assemble(_program(machine, is_truncate_denied=is_truncate_denied))
    code = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0) != 0:
        failure = ctypes.get_errno()
        raise OSError(failure, f"seccomp filter: {os.strerror(failure)}")


def _program(machine: Machine, *, is_truncate_denied: bool) -> list[Instruction]:
    """Straight-line blocks: each either returns or falls through to the next."""
    denied = (*machine.denied, machine.truncate) if is_truncate_denied else machine.denied
    deny = (RETURN, 0, 0, RET_ERRNO | errno.EPERM)
    program: list[Instruction] = [
        (LOAD_WORD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, machine.audit_arch),
        deny,
        (LOAD_WORD, 0, 0, OFFSET_NUMBER),
        (JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        deny,
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, RET_ERRNO | errno.ENOSYS),
    ]
    for number in denied:
        program += [(JUMP_EQUAL, 0, 1, number), deny]
    program += _clone_block(machine)
    program += _socket_block(machine)
    return program


CLONE_NEW_MASK = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
JUMP_ANY_BIT = 0x45


def _clone_block(machine: Machine) -> list[Instruction]:
    """clone() that makes no namespace is allowed; clone3() hides its flags and is not there."""
    return [
        (JUMP_EQUAL, 0, 4, machine.clone),
        (LOAD_WORD, 0, 0, OFFSET_ARGS),
        (JUMP_ANY_BIT, 0, 1, CLONE_NEW_MASK),
        (RETURN, 0, 0, RET_ERRNO | errno.EPERM),
        (RETURN, 0, 0, RET_ALLOW),
    ]


def _socket_block(machine: Machine) -> list[Instruction]:
    refuse = (RETURN, 0, 0, RET_ERRNO | errno.EACCES)
    allow = (RETURN, 0, 0, RET_ALLOW)
    return [
        (JUMP_EQUAL, 1, 0, machine.socket),
        allow,
        (LOAD_WORD, 0, 0, OFFSET_ARGS),
        (JUMP_EQUAL, 2, 0, AF_INET),
        (JUMP_EQUAL, 1, 0, AF_INET6),
        refuse,
        (LOAD_WORD, 0, 0, OFFSET_ARGS + 8),
        (AND, 0, 0, SOCK_TYPE_MASK),
        (JUMP_EQUAL, 1, 0, SOCK_STREAM),
        refuse,
        (LOAD_WORD, 0, 0, OFFSET_ARGS + 16),
        (JUMP_EQUAL, 2, 0, 0),
        (JUMP_EQUAL, 1, 0, IPPROTO_TCP),
        refuse,
        allow,
    ]


def _assemble(program: list[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
