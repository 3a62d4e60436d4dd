"""Landlock through ctypes: confine the calling process to folders, one TCP port and its own kind.

Owns the three system calls and the table of rights by ABI. Must not know launches or limits.
Standard library only. Invariants: rights the running kernel does not know are never asked for;
what it cannot enforce is said by `missing`, not ignored.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

SYS_CREATE_RULESET = 444
SYS_ADD_RULE = 445
SYS_RESTRICT_SELF = 446
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
RULE_NET_PORT = 2
PR_SET_NO_NEW_PRIVS = 38
NET_BIND_TCP = 1
NET_CONNECT_TCP = 2
SCOPE_ABSTRACT_UNIX = 1
SCOPE_SIGNAL = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Abi(IntEnum):
    """The Landlock ABI that first had a right."""

    BASE = 1
    REFER = 2
    TRUNCATE = 3
    NET = 4
    IOCTL = 5
    SCOPE = 6


class Fs(IntFlag):
    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


READ = Fs.EXECUTE | Fs.READ_FILE | Fs.READ_DIR
WRITE = (
    READ
    | Fs.WRITE_FILE
    | Fs.REMOVE_DIR
    | Fs.REMOVE_FILE
    | Fs.MAKE_DIR
    | Fs.MAKE_REG
    | Fs.MAKE_FIFO
    | Fs.MAKE_SYM
    | Fs.REFER
    | Fs.TRUNCATE
)
DEVICE = Fs.READ_FILE | Fs.WRITE_FILE
FILE_RIGHTS = int(Fs.EXECUTE | Fs.WRITE_FILE | Fs.READ_FILE | Fs.TRUNCATE | Fs.IOCTL_DEV)
ALL_RIGHTS = (int(Fs.IOCTL_DEV) << 1) - 1
REFER_RIGHT, TRUNCATE_RIGHT, IOCTL_RIGHT = int(Fs.REFER), int(Fs.TRUNCATE), int(Fs.IOCTL_DEV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What stays allowed. Paths that do not exist are skipped: nothing is allowed there.

    `connect_ports` None leaves the network to others; an empty one closes TCP.
    """

    read_paths: tuple[str, ...]
    write_paths: tuple[str, ...]
    device_paths: tuple[str, ...] = ()
    connect_ports: tuple[int, ...] | None = field(default=())


def abi_version() -> int:
    """The kernel's Landlock ABI; 0 where there is none or it is switched off."""
    found = _libc.syscall(SYS_CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)
    return max(int(found), 0)


def missing(abi: int) -> tuple[str, ...]:
    """What this ABI cannot enforce, in words."""
    words = []
    if abi < Abi.NET:
        words.append("TCP ports (needs Linux 6.7)")
    if abi < Abi.SCOPE:
        words.append("signals to processes of the same user (needs Linux 6.12)")
    return tuple(words)


def restrict_self(rules: Rules, abi: int) -> None:
    """Confine this process and all it starts, for good. Raises OSError."""
    ruleset = _create_ruleset(abi, is_net_handled=rules.connect_ports is not None)
    try:
        _allow_paths(ruleset, rules.read_paths, READ, abi)
        _allow_paths(ruleset, rules.write_paths, WRITE, abi)
        _allow_paths(ruleset, rules.device_paths, DEVICE, abi)
        if abi >= Abi.NET:
            for port in rules.connect_ports or ():
                _call(
                    SYS_ADD_RULE,
                    ruleset,
                    RULE_NET_PORT,
                    struct.pack("=QQ", NET_CONNECT_TCP, port),
                    0,
                )
        set_no_new_privs()
        _call(SYS_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def set_no_new_privs() -> None:
    """No program started from here on gains privileges by being executed. Raises OSError."""
    if _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        _raise("no_new_privs")


def _handled(abi: int) -> int:
    """The rights this ABI knows; plain numbers, as flags are slow and this is in every launch."""
    later = (
        (Abi.REFER, REFER_RIGHT),
        (Abi.TRUNCATE, TRUNCATE_RIGHT),
        (Abi.IOCTL, IOCTL_RIGHT),
    )
    return ALL_RIGHTS & ~sum(right for needed, right in later if abi < needed)


def _create_ruleset(abi: int, *, is_net_handled: bool) -> int:
    words = [_handled(abi)]
    if abi >= Abi.NET:
        words.append((NET_BIND_TCP | NET_CONNECT_TCP) if is_net_handled else 0)
    if abi >= Abi.SCOPE:
        words.append(SCOPE_ABSTRACT_UNIX | SCOPE_SIGNAL)
    attributes = struct.pack(f"={len(words)}Q", *words)
    return _call(SYS_CREATE_RULESET, attributes, len(attributes), 0)


def _allow_paths(ruleset: int, paths: Iterable[str], rights: Fs, abi: int) -> None:
    for_folders = int(rights) & _handled(abi)
    for_files = for_folders & FILE_RIGHTS
    for path in paths:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
            beneath = struct.pack("=Qi", for_folders if is_folder else for_files, opened)
            _call(SYS_ADD_RULE, ruleset, RULE_PATH_BENEATH, beneath, 0)
        finally:
            os.close(opened)


def _call(number: int, *arguments: int | bytes) -> int:
    """A Landlock system call; pointers are bytes. Raises OSError."""
    converted = [
        ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_long(argument)
        for argument in arguments
    ]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        _raise(f"landlock call {number}")
    return result


def _raise(what: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")
