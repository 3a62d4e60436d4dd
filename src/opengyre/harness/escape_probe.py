"""What the self-test runs inside a sandbox: try what must fail, and what must work.

A program of its own (its text is passed to an interpreter); standard library only. It prints one
JSON list of sentences, one for each attempt that went the wrong way.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONNECT_TIMEOUT_S = 0.5


def write_new(path: str) -> None:
    Path(path).write_text("escaped")


def read_some(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=CONNECT_TIMEOUT_S).close()


def open_socket(family: int, kind: int) -> None:
    socket.socket(family, kind).close()


def works(attempt: Callable[..., None], *arguments: Any) -> bool:
    try:
        attempt(*arguments)
    except OSError:
        return False
    return True


def escapes(plan: dict[str, Any]) -> list[str]:
    """`plan` has paths and ports; a missing one is not tried on this kernel."""
    outside = plan["outside"]
    attempts: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [
        ("wrote outside its workspace", write_new, (outside + "/new",)),
        ("overwrote a file outside its workspace", write_new, (outside + "/secret",)),
        ("read another workspace", read_some, (outside + "/secret",)),
        ("truncated a file outside its workspace", os.truncate, (outside + "/secret", 0)),
        ("removed a file outside its workspace", os.unlink, (outside + "/secret",)),
        ("linked a file from outside", os.link, (outside + "/secret", "linked")),
        ("read the environment of another process", read_some, (f"/proc/{plan['pid']}/environ",)),
    ]
    if plan["other_port"]:
        attempts.append(("connected to another port", connect, (plan["other_port"],)))
    if plan["is_signal_closed"]:
        attempts.append(("could signal its controller", os.kill, (plan["pid"], 0)))
    if plan["is_filtered"]:
        udp = (socket.AF_INET, socket.SOCK_DGRAM)
        unix = (socket.AF_UNIX, socket.SOCK_STREAM)
        attempts.append(("opened a UDP socket", open_socket, udp))
        attempts.append(("opened a unix socket", open_socket, unix))
    return [f"it {words}" for words, attempt, args in attempts if works(attempt, *args)]


def hindrances(plan: dict[str, Any]) -> list[str]:
    temporary = os.environ["TMPDIR"] + "/file"
    needed = [path for path in plan["readable"] if not os.path.isdir(path)]
    found = [
        f"it cannot write {path}" for path in ("file", temporary) if not works(write_new, path)
    ]
    found += [f"it cannot read {path}" for path in needed if not works(read_some, path)]
    if not works(connect, plan["gateway_port"]):
        found.append("it cannot reach the gateway's port")
    least = plan["least_python"]
    if list(sys.version_info) < least:
        found.append(f"it cannot use {sys.executable}: older than Python {least[0]}.{least[1]}")
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(escapes(given) + hindrances(given)))
