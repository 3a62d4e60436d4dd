"""What every protocol's translator gives: JSON bodies to neutral requests, pieces to its events.

Implementations: one pure module for each protocol beside this one. Must not know: HTTP, sessions,
tokens. Invariants: a field that would change the meaning and cannot be honoured is refused, others
are tolerated; a stream's last event is one write, and without it the answer is not complete.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from opengyre.gateway.request import Answer, Piece, Refusal, Request


class AnswerForm(Protocol):
    """One answer as its client wants it: `whole`, or `opening`, `delta`..., `closing` in this
    order. It may remember what it sent. All return bytes of the body: JSON, or SSE events."""

    def whole(self, answer: Answer) -> bytes:
        """The body of an unstreamed answer."""
        ...

    def opening(self, num_prompt_tokens: int) -> bytes: ...

    def delta(self, pieces: Sequence[Piece], logprobs: Sequence[Any] = ()) -> bytes:
        """Events for `pieces`, b"" for none. `logprobs` (TokenLogprob) of the tokens behind them
        if they were asked for."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """Everything that ends the stream, the terminal event last."""
        ...


class Dialect(Protocol):
    """A protocol. `name` is what a turn's record says."""

    name: str

    def parse(self, body: dict[str, Any]) -> Request:
        """Raises Refusal, naming the field, for what is malformed or cannot be honoured."""
        ...

    def form(
        self, body: dict[str, Any], request: Request, *, name: str, created_s: int
    ) -> AnswerForm:
        """The form of the answer to `body`. `name` is the turn's and attempt's, like
        `e000123.t7.a0`; ids of answers and items are made of it."""
        ...

    def error_json(self, refusal: Refusal) -> bytes: ...
