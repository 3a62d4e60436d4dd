"""A server of bytes outlives what happens to the threads of its callers."""

import socket
import threading
from typing import NoReturn

import pytest

from opengyre.transport.byte_server import MAX_READERS, ByteServer


def _ask(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        return connection.recv(1)


def test_a_thread_that_cannot_be_started_costs_one_caller_and_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    server = ByteServer(("127.0.0.1", 0), lambda connection: connection.sendall(b"!"), name="b")
    try:
        with monkeypatch.context() as faulty:
            faulty.setattr(threading.Thread, "start", refuse)
            assert {_ask(server.port) for _ in range(MAX_READERS + 1)} == {b""}
        assert _ask(server.port) == b"!"
        with monkeypatch.context() as faulty:
            faulty.setattr(threading.Thread, "start", refuse)
            assert _ask(server.port) == b""
    finally:
        server.close()
