"""One attempt of a turn from its admission to its record: generate, write, commit or abandon.

Must not know: which dialect it speaks, where engines are. Invariants: committed means that the
terminal event was given to an open connection; an answer that cannot be finished is refused before
its first byte or reset after it; every admitted attempt is recorded exactly once.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from opengyre.gateway.connection import ClientLeft, Connection
from opengyre.gateway.continuation import Generation
from opengyre.gateway.dialects.openai_chat import ChatAnswer
from opengyre.gateway.output import AnswerParser
from opengyre.gateway.request import Answer, Piece, Refusal, RefusalKind, Usage
from opengyre.gateway.routing import NoEngine
from opengyre.gateway.sessions import Attempt, Session
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord

RETRY_AFTER_S = 5
_NO_REF = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)
_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeParts:
    """What one exchange is made of. `now_s` is the run's clock."""

    session: Session
    attempt: Attempt
    form: ChatAnswer
    generation: Generation
    parser: AnswerParser
    connection: Connection
    now_s: Callable[[], float]
    hold_comment_s: float


class Exchange:
    def __init__(self, parts: ExchangeParts) -> None:
        self._parts = parts
        self._is_stream = parts.attempt.request.is_stream
        self._connection = parts.connection
        self._parser = parts.parser
        self._sampled = parts.generation.sampled
        self._form = parts.form
        self._received_s = parts.now_s()
        self._first_token_s = 0.0
        self._num_fed = 0
        self._finish = "error"
        self._is_committed = False
        self._has_given_up = False
        self._refusal: Refusal | None = None

    def abort(self) -> None:
        """The client is cut off; its request is cancelled at the engine."""
        self._connection.abort()

    def is_same_body(self, body_key: bytes) -> bool:
        """True while its answer is not out and another request with this body may be a retry."""
        return not self._is_committed and self._parts.attempt.body_key == body_key

    def yield_to_retry(self, *, is_marked: bool) -> None:
        """Abandoned at once if its client is gone or says that it tries again."""
        if is_marked or self._connection.is_gone:
            self.abort()
            self._parts.session.abandon(self._parts.attempt)

    async def run(self) -> None:
        """Serve it; a client that left is an outcome, not an error.

        Raises Refusal if no engine came before the first byte. `record` is right afterwards, also
        after an error.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                side = [tasks.create_task(self._connection.watch())]
                if self._is_stream:
                    side.append(tasks.create_task(self._comment()))
                await self._answer()
                for task in side:
                    task.cancel()
        except* ClientLeft:
            is_ours = self._is_committed or self._has_given_up
            self._finish = self._finish if is_ours else "cancelled"
        finally:
            self._settle()
        if self._refusal is not None:
            raise self._refusal

    async def _answer(self) -> None:
        try:
            await self._generate()
        except NoEngine as error:
            await self._give_up(error)
            return
        pieces = self._parser.finish()
        is_cut = self._sampled.is_length and not self._parser.is_stop_string
        ending = self._parser.ending(is_cut=is_cut)
        usage = self._usage()
        if self._is_stream:
            await self._open_stream()
            last = self._form.delta(pieces) + self._form.closing(ending, usage)
        else:
            answer = Answer(message=self._parser.message(), ending=ending, usage=usage)
            last = self._form.whole(answer)
            await self._connection.begin(200, _json_headers(last))
        await self._connection.write(last)
        self._finish = "length" if is_cut else "stop"
        self._commit_if_written()
        await self._connection.end()

    async def _generate(self) -> None:
        async with aclosing(self._parts.generation.chunks()) as chunks:
            async for ids in chunks:
                if self._parser.is_stopped:
                    break
                pieces = self._feed(ids)
                if pieces and self._is_stream:
                    await self._open_stream()
                    await self._connection.write(self._form.delta(pieces))
                if self._parser.is_stop_string:
                    break
        self._sampled.cut(self._num_fed)

    def _feed(self, ids: list[int]) -> list[Piece]:
        if ids and not self._first_token_s:
            self._first_token_s = self._parts.now_s()
        pieces: list[Piece] = []
        for token in ids:
            pieces += self._parser.feed(token)
            self._num_fed += 1
            if self._parser.is_stopped:
                break
        return pieces

    async def _open_stream(self) -> None:
        if not self._connection.has_begun:
            await self._connection.begin(200, _SSE)
            await self._connection.write(self._form.opening())

    async def _comment(self) -> None:
        """A comment after each silence, so that nobody between us and the client gives up."""
        while True:
            num_before = self._connection.num_writes
            await asyncio.sleep(self._parts.hold_comment_s)
            if self._connection.num_writes == num_before:
                await self._open_stream()
                await self._connection.write(b": held\n\n")

    async def _give_up(self, error: NoEngine) -> None:
        self._has_given_up = True
        if self._connection.has_begun:
            await self._connection.reset()
        else:
            self._refusal = Refusal(str(error), kind=RefusalKind.UNAVAILABLE)

    def _commit_if_written(self) -> None:
        if self._connection.is_gone:
            raise ClientLeft
        self._is_committed = True
        self._parts.session.commit(
            self._parts.attempt,
            completion_ids=self._sampled.ids,
            message=self._parser.message(),
        )

    def _settle(self) -> None:
        self._sampled.cut(self._num_fed)
        if not self._is_committed:
            self._parts.session.abandon(self._parts.attempt)

    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=len(self._parts.attempt.prompt_ids),
            num_completion_tokens=len(self._sampled.ids),
            num_reused_tokens=self._parts.attempt.num_kept,
        )

    def record(self) -> TokenRecord:
        attempt, sampled = self._parts.attempt, self._sampled
        new_ids = attempt.prompt_ids[attempt.num_kept :]
        header = TurnRecord(
            turn=attempt.turn,
            execution=self._parts.session.execution,
            attempt=attempt.attempt,
            parent=attempt.parent.turn if attempt.parent else "",
            fork_reason=attempt.fork_reason.value,
            role="main",
            num_kept_tokens=attempt.num_kept,
            num_new_prompt_tokens=len(new_ids),
            num_completion_tokens=len(sampled.ids),
            spans=list(sampled.spans),
            finish=self._finish,
            is_committed=self._is_committed,
            ref=_NO_REF,
            received_s=self._received_s,
            first_token_s=self._first_token_s,
            ended_s=self._parts.now_s(),
            held_s=sampled.held_s,
            num_continuations=sampled.num_continuations,
        )
        return TokenRecord(
            header=header,
            new_prompt_ids=new_ids,
            completion_ids=list(sampled.ids),
            logprobs=list(sampled.logprobs),
            request_delta=attempt.delta,
        )


def _json_headers(body: bytes) -> dict[str, str]:
    return {"content-type": _JSON, "content-length": str(len(body))}


async def refuse(connection: Connection, refusal: Refusal, body: bytes) -> None:
    """Answer with `body`, the refusal in its dialect; nothing may have been written yet."""
    headers = _json_headers(body)
    if refusal.kind is RefusalKind.UNAVAILABLE:
        headers["retry-after"] = str(RETRY_AFTER_S)
    if refusal.status in (408, 413):
        headers["connection"] = "close"
    await connection.begin(refusal.status, headers)
    await connection.write(body)
    await connection.end()
