"""One attempt of a turn from its admission to its record: generate, write, commit or abandon.

Must not know: which dialect it speaks, where engines are. Invariants: committed means that the
terminal event was given to an open connection; an answer that cannot be finished is refused before
its first byte or reset after it; every admitted attempt is recorded exactly once.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from opengyre.gateway.call_counts import count_calls
from opengyre.gateway.connection import ClientLeft, Connection
from opengyre.gateway.continuation import EngineRefused, Generation
from opengyre.gateway.dialects.dialect import AnswerForm
from opengyre.gateway.rendering.output import AnswerParser
from opengyre.gateway.request import (
    Answer,
    Ending,
    Piece,
    Refusal,
    RefusalKind,
    TokenLogprob,
    Usage,
)
from opengyre.gateway.routing import NoEngine
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Attempt
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
_NO_REF = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)
_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeParts:
    """What one exchange is made of. `num_retries`: the how-many-eth try
    its client says this is; `keep` writes its record down, or
    tells that it could not; `now_s` is the run's clock;
    `token_bytes` tells a token's bytes; calls with `watched` in them are counted."""

    session: Session
    attempt: Attempt
    num_retries: int
    form: AnswerForm
    generation: Generation
    parser: AnswerParser
    connection: Connection
    keep: Callable[[TokenRecord], bool]
    now_s: Callable[[], float]
    token_bytes: Callable[[int], bytes]
    hold_comment_s: float
    watched: re.Pattern[str] | None = None


class Exchange:
    def __init__(self, parts: ExchangeParts) -> None:
        self._parts = parts
        self._is_stream = parts.attempt.incoming.request.is_stream
        self._connection = parts.connection
        self._parser = parts.parser
        self._sampled = parts.generation.sampled
        self._form = parts.form
        self._received_s = parts.now_s()
        self._first_token_s = 0.0
        self._has_logprobs = parts.attempt.incoming.request.has_logprobs
        self._num_fed = 0
        self._num_told = 0
        self._finish = "error"
        self._is_committed = False
        self._has_given_up = False
        self._refusal: Refusal | None = None

    def abort(self) -> None:
        """The client is cut off; its request is cancelled at the engine."""
        self._connection.abort()

    def is_same_call(self, call_key: bytes) -> bool:
        """True while its answer is not out and another call with this key may be a retry."""
        return not self._is_committed and self._parts.attempt.place.call_key == call_key

    def yield_if_left(self) -> None:
        """A client that is gone may come back with what it has seen."""
        if not self._is_committed and self._connection.is_gone:
            self._abandon()

    def yield_to_retry(self, num_retries: int) -> None:
        """Abandoned at once if its client is gone, or says that the other came after it."""
        if num_retries > self._parts.num_retries or self._connection.is_gone:
            self.abort()
            self._abandon()

    async def run(self) -> None:
        """Serve it; a client that left is an outcome, not an error.

        Raises Refusal if no engine came before the first byte. Its record is kept once, also after
        an error.
        """
        has_left = False
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
            has_left = True
        finally:
            self._settle()
        if has_left:
            await self._connection.gone()
        if self._refusal is not None:
            raise self._refusal

    async def _answer(self) -> None:
        try:
            await self._generate()
        except NoEngine as error:
            await self._give_up(Refusal(str(error), kind=RefusalKind.UNAVAILABLE))
            return
        except EngineRefused as error:
            log.warning("%s is refused: %s", self._parts.attempt.name, error)
            await self._give_up(Refusal(f"the engine refuses this request: {error}"))
            return
        pieces = self._parser.finish()
        answer = self._finished()
        if self._is_stream:
            await self._open_stream()
            rest = self._form.delta(pieces, answer.logprobs[self._num_told :])
            last = rest + self._form.closing(answer)
        else:
            last = self._form.whole(answer)
            await self._connection.begin(200, _json_headers(last))
        await self._connection.write(last)
        self._finish = "length" if answer.ending is Ending.LENGTH else "stop"
        self._commit_if_written()
        await self._connection.end()

    async def _generate(self) -> None:
        async with aclosing(self._parts.generation.chunks()) as chunks:
            async for ids in chunks:
                if self._parser.is_stopped:
                    break
                await self._show(self._feed(ids))
                if self._parser.is_ended_early:
                    break
        self._sampled.cut(self._num_fed)

    async def _show(self, pieces: list[Piece]) -> None:
        if not self._is_stream or not (pieces or self._has_logprobs):
            return
        await self._open_stream()
        logprobs = self._logprobs(self._num_told) if self._has_logprobs else ()
        self._num_told = self._num_fed
        event = self._form.delta(pieces, logprobs)
        if event:
            await self._connection.write(event)

    def goes_on_from(self, ids: list[int]) -> bool:
        """Its prompt begins with them."""
        return self._parts.attempt.place.prompt_ids[: len(ids)] == ids

    def _feed(self, ids: list[int]) -> list[Piece]:
        if ids and not self._first_token_s:
            self._first_token_s = self._parts.now_s()
        pieces, num_taken = self._parser.feed_all(ids)
        self._num_fed += num_taken
        return pieces

    async def _open_stream(self) -> None:
        if not self._connection.has_begun:
            await self._connection.begin(200, _SSE)
            num_prompt_tokens = len(self._parts.attempt.place.prompt_ids)
            await self._connection.write(self._form.opening(num_prompt_tokens))

    async def _comment(self) -> None:
        """A comment after each silence, so that nobody between us and the client gives up."""
        loop = asyncio.get_running_loop()
        began_s, patience_s = loop.time(), self._parts.hold_comment_s
        while True:
            silent_s = loop.time() - (self._connection.written_s or began_s)
            if silent_s < patience_s:
                await asyncio.sleep(patience_s - silent_s)
            else:
                await self._open_stream()
                await self._connection.write(b": held\n\n")

    async def _give_up(self, refusal: Refusal) -> None:
        self._has_given_up = True
        if self._connection.has_begun:
            await self._connection.reset()
        else:
            self._refusal = refusal

    def _commit_if_written(self) -> None:
        """What was written leaves with the next turn of the loop, so a record that the disk refuses
        takes it back."""
        if self._connection.is_gone:
            raise ClientLeft
        self._is_committed = True
        if not self._parts.keep(self._record()):
            self._connection.abort()
            raise ClientLeft
        self._parts.session.commit(
            self._parts.attempt,
            completion_ids=self._sampled.ids,
            message=self._parser.message(),
        )

    def _settle(self) -> None:
        if not self._is_committed:
            self._sampled.cut(self._num_fed)
            self._abandon()
            self._parts.keep(self._record())

    def _abandon(self) -> None:
        seen_ids = self._sampled.ids[: self._num_fed]
        self._parts.session.abandon(self._parts.attempt, seen_ids)

    def _finished(self) -> Answer:
        is_cut = self._sampled.is_length and not self._parser.is_ended_early
        return Answer(
            message=self._parser.message(),
            ending=self._parser.ending(is_cut=is_cut),
            usage=self._usage(),
            stop_string=self._parser.stop_string,
            logprobs=self._logprobs(0) if self._has_logprobs else (),
        )

    def _logprobs(self, start: int) -> tuple[TokenLogprob, ...]:
        """Of the tokens that were fed from number `start` on."""
        sampled = self._sampled
        pairs = zip(sampled.ids[start:], sampled.logprobs[start : self._num_fed], strict=False)
        return tuple(self._logprob(token, logprob) for token, logprob in pairs)

    def _logprob(self, token: int, logprob: float) -> TokenLogprob:
        data = self._parts.token_bytes(token)
        return TokenLogprob(text=data.decode(errors="replace"), data=data, logprob=logprob)

    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=len(self._parts.attempt.place.prompt_ids),
            num_completion_tokens=len(self._sampled.ids),
            num_reused_tokens=self._parts.attempt.place.num_kept,
        )

    def _record(self) -> TokenRecord:
        attempt, sampled = self._parts.attempt, self._sampled
        place, asked = attempt.place, self._parts.generation.request
        new_ids = place.prompt_ids[place.num_kept :]
        counts = count_calls(
            self._parser.begun, is_cut=self._finish != "stop", watched=self._parts.watched
        )
        header = TurnRecord(
            turn=attempt.turn,
            execution=self._parts.session.execution,
            attempt=attempt.attempt,
            parent=place.parent.turn if place.parent else "",
            parent_attempt=place.parent.attempt if place.parent else None,
            fork_reason=place.fork_reason.value,
            role=attempt.incoming.role,
            protocol=attempt.incoming.protocol,
            num_kept_tokens=place.num_kept,
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
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            logprob_mode=sampled.logprob_mode,
            num_calls=counts.num_read,
            num_malformed_calls=counts.num_malformed,
            num_watched_calls=counts.num_watched,
        )
        return TokenRecord(
            header=header,
            new_prompt_ids=new_ids,
            completion_ids=list(sampled.ids),
            logprobs=list(sampled.logprobs),
            request_delta=place.delta,
        )


def _json_headers(body: bytes) -> dict[str, str]:
    return {"content-type": _JSON, "content-length": str(len(body))}


async def answer_json(connection: Connection, body: bytes) -> None:
    """A whole answer that is no model call."""
    await connection.begin(200, _json_headers(body))
    await connection.write(body)
    await connection.end()


async def refuse(connection: Connection, refusal: Refusal, body: bytes) -> None:
    """Answer with `body`, the refusal in its dialect; nothing may have been written yet."""
    headers = _json_headers(body)
    if refusal.kind in (RefusalKind.UNAVAILABLE, RefusalKind.TOO_MANY):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if refusal.status in (408, 413):
        headers["connection"] = "close"
    await connection.begin(refusal.status, headers)
    await connection.write(body)
    await connection.end()
