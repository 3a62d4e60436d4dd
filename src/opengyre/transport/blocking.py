"""Typed messages over one socket between two processes that wait for each other.

Owns: framing (4 bytes of length, then msgpack). Must not know: what a message means. Invariants:
every wait has a deadline; end of file is death and raises BoundaryError.
"""

import socket
from typing import Any

import msgspec

from opengyre.seams.errors import BoundaryError

MAX_FRAME_BYTES = 256 * 2**20


class Channel:
    """One end. `types` is the closed set of message Structs, each with a tag."""

    def __init__(self, connection: socket.socket, types: tuple[type[msgspec.Struct], ...]) -> None:
        union: Any = types[0]
        for one in types[1:]:
            union = union | one
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)

    def send(self, message: msgspec.Struct, *, timeout_s: float) -> None:
        body = self._encoder.encode(message)
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(len(body).to_bytes(4, "little") + body)
        except OSError as error:
            raise _gone(error) from error

    def receive(self, *, timeout_s: float | None) -> Any:
        """The next message; None waits for as long as the other end lives."""
        self._connection.settimeout(timeout_s)
        try:
            size = int.from_bytes(self._read(4), "little")
            if size > MAX_FRAME_BYTES:
                raise BoundaryError("channel", f"a frame of {size} bytes", retryable=False)
            return self._decoder.decode(self._read(size))
        except (OSError, msgspec.MsgspecError) as error:
            raise _gone(error) from error

    def close(self) -> None:
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes:
        body = bytearray(num_bytes)
        view, position = memoryview(body), 0
        while position < num_bytes:
            num_read = self._connection.recv_into(view[position:])
            if num_read == 0:
                raise ConnectionError("the other end is gone")
            position += num_read
        return bytes(body)


def _gone(error: Exception) -> BoundaryError:
    words = str(error) or type(error).__name__
    return BoundaryError("channel", words, retryable=False)
