"""The lead's side of the other stages of its cell, each in a process of its own.

Must not know: what an order does. Invariants: a stage has one order at a time, or serves the
pipeline; every wait for an answer has a deadline.
"""

from opengyre.control.errors import InvariantError
from opengyre.seams.errors import BoundaryError
from opengyre.trainer import orders as o
from opengyre.transport.blocking import Channel

ANSWER_S = 120.0


class RemoteStage:
    """Orders go over `channel`; `send` and `answer` come in pairs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._is_asked = False

    def send(self, order: o.Order) -> None:
        if self._is_asked:
            raise InvariantError(f"{type(order).__name__} to a stage that has not answered yet")
        self._channel.send(order, timeout_s=ANSWER_S)
        self._is_asked = True

    def answer(self) -> o.Order:
        """Raises the BoundaryError that the order ended with, or that of a lost stage."""
        answer: o.Order = self._channel.receive(timeout_s=ANSWER_S)
        self._is_asked = False
        if isinstance(answer, o.Refused):
            raise BoundaryError(answer.boundary, answer.reason, retryable=answer.retryable)
        return answer
