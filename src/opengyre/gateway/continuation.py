"""One turn's generation: one list of tokens, however many engines it takes.

Owns: submitting, continuing from prompt + tokens so far, spans, the budget. Must not know: HTTP,
messages, text. Invariants: the budget and the seed belong to the turn; a part is told apart by
(turn, attempt, incarnation, part number), and what an earlier part still says is never read;
every token carries the engine and version that sampled it; without progress for `hold_max_s`, or
after `MAX_PARTS`, it gives up; a prefix that an engine keeps for it is offered to the next one and
let go of when that one samples, or when the turn is over.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from opengyre.gateway.handoffs import Handoffs, Kept, wrong_with
from opengyre.gateway.routing import EngineLost, NoEngine, Routing, Seat
from opengyre.seams.engine import ENGINE_LOST, Chunk, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef
from opengyre.seams.records import Span

MAX_PARTS = 1000
MAX_REFUSALS = 2
CANCEL_GRACE_S = 10.0
TURNED_BACK_S = 1.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_MIN_LOGPROB = -1e30
_MAX_LOGPROB = 1e-2  # rounding of what is 0


class EngineRefused(Exception):
    """Engines say that this request cannot be served; another try would be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """What to sample. `request.request_id` is `turn.aATTEMPT`; parts append to it. `num_ids`: how
    many there are in the model's vocabulary."""

    turn: str
    attempt: int
    request: GenerateRequest
    num_ids: int
    hold_max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """One move of a running turn, as it is told to the controller."""

    execution: str
    turn: str
    attempt: int
    from_engine: str
    to_engine: str
    reason: str
    num_tokens_so_far: int


@dataclass(slots=True, kw_only=True)
class Sampled:
    """The tokens of a turn so far; grows while the generation runs."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    num_continuations: int = 0
    held_s: float = 0.0
    is_length: bool = False
    logprob_mode: str = ""

    def add(self, chunk: Chunk, engine_id: str) -> None:
        start, end = len(self.ids), len(self.ids) + len(chunk.ids)
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        last = self.spans[-1] if self.spans else None
        if last and (last.engine, last.policy_version) == (engine_id, chunk.policy_version):
            self.spans[-1] = msgspec.structs.replace(last, end=end)
            return
        span = Span(start=start, end=end, policy_version=chunk.policy_version, engine=engine_id)
        self.spans.append(span)

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`."""
        del self.ids[num_tokens:], self.logprobs[num_tokens:]
        kept = [span for span in self.spans if span.start < num_tokens]
        if kept:
            end = min(kept[-1].end, num_tokens)
            kept[-1] = msgspec.structs.replace(kept[-1], end=end)
        self.spans = kept


class Generation:
    """Iterate `chunks()` for the new ids; `sampled` holds all of them.

    Leaving the iteration early (or being cancelled in it) cancels at the engine; close it with
    `aclosing`.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        *,
        routing: Routing,
        handoffs: Handoffs,
        on_continued: Callable[[Continued], None],
    ) -> None:
        self._plan = plan
        self._routing = routing
        self._handoffs = handoffs
        self._on_continued = on_continued
        self._num_parts = 0
        self._num_failures = 0
        self._num_refusals = 0
        self._stuck_since_s: float | None = None
        self._moved: tuple[str, str] | None = None
        self._kept: Kept | None = None
        self._is_done = False
        self.sampled = Sampled()

    @property
    def request(self) -> GenerateRequest:
        return self._plan.request

    async def chunks(self) -> AsyncGenerator[list[int], None]:
        """New ids as they come, at times none; ends when the turn is over.

        A part that gave nothing counts as failed: the next one waits a little; the time that it
        worked until it was frozen counts as no waiting. Raises NoEngine when it gives up,
        EngineRefused when it is refused.
        """
        try:
            async with contextlib.aclosing(self._parts()) as parts:
                async for ids in parts:
                    yield ids
        finally:
            self._keep_instead(None)

    async def _parts(self) -> AsyncGenerator[list[int], None]:
        now_s = asyncio.get_running_loop().time
        while self._num_left() > 0 and not self._is_done:
            seat = await self._next_seat()
            num_before, began_s, chunk = len(self.sampled.ids), now_s(), Chunk()
            async with contextlib.aclosing(self._part(seat)) as part:
                async for chunk in part:
                    self._take(chunk, seat)
                    yield chunk.ids
            self._num_failures += len(self.sampled.ids) == num_before
            if chunk.finish is Finish.FROZEN and self._stuck_since_s is not None:
                self._stuck_since_s += now_s() - began_s
        self.sampled.is_length |= not self._is_done

    def _take(self, chunk: Chunk, seat: Seat) -> None:
        """A move is told when the new engine gives something, not for each engine tried."""
        is_end = chunk.finish in (Finish.STOP, Finish.LENGTH)
        if self._moved is not None and (chunk.ids or is_end):
            self._tell(self._moved, seat.engine_id)
            self._moved = None
        if self._kept is not None:
            self._take_of_kept(self._kept, chunk, is_sampling=bool(chunk.ids) or is_end)
        if chunk.ids:
            self.sampled.add(chunk, seat.engine_id)
            self._num_failures = 0
            self._stuck_since_s = None
        if chunk.finish is None:
            return
        self._num_refusals += chunk.finish is Finish.REFUSED
        if self._num_refusals >= MAX_REFUSALS:
            raise EngineRefused(f"{seat.engine_id}: {chunk.reason}")
        self._is_done = is_end or self._is_stopped()
        self.sampled.is_length = chunk.finish is Finish.LENGTH
        self._moved = self._moved or (seat.engine_id, chunk.reason or str(chunk.finish))
        if chunk.kv is not None:
            self._keep_instead(self._kept_of(chunk.kv, seat))
        if chunk.finish is Finish.FROZEN:
            self._keep_for_readers()

    def _keep_for_readers(self) -> None:
        """What nobody can read now is not kept: its engine waits for the end of it."""
        if self._kept is not None and self._routing.open_seat(self._plan.request.execution) is None:
            self._kept.let_go()

    def _kept_of(self, ref: KVRef, seat: Seat) -> Kept | None:
        turn, attempt = self._plan.turn, self._plan.attempt
        return self._handoffs.keep(ref, seat, turn=turn, attempt=attempt)

    def _take_of_kept(self, kept: Kept, chunk: Chunk, *, is_sampling: bool) -> None:
        """What the engine to which it was offered says."""
        if chunk.taken is not None:
            kept.acknowledge(chunk.taken)
        if is_sampling:
            kept.take_over()
            self._kept = None

    def _keep_instead(self, kept: Kept | None) -> None:
        if self._kept is not None:
            self._kept.let_go()
        self._kept = kept

    async def _part(self, seat: Seat) -> AsyncGenerator[Chunk, None]:
        """Chunks of one submission up to its terminal one; loss is an `error` chunk."""
        request = self._next_request(seat, await self._kept_for(seat))
        self.sampled.logprob_mode = seat.engine.caps().logprob_mode
        stream = seat.engine.submit(request)
        is_over = False
        try:
            with self._routing.lease(seat) as lease:
                chunk = Chunk()
                while chunk.finish is None:
                    told = await lease.wait_for(_next_chunk(stream, seat))
                    chunk = self._checked(told, request)
                    is_over = told.finish is not None
                    yield chunk
        except (EngineLost, BoundaryError) as error:
            is_over = True
            yield Chunk(finish=Finish.ERROR, reason=str(error) or ENGINE_LOST)
        finally:
            if not is_over:
                await _cancel(seat, request.request_id)
                await self._give_back(stream, seat)
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()

    async def _give_back(self, stream: AsyncIterator[Chunk], seat: Seat) -> None:
        """What was cancelled may have been frozen before; its last chunk is here by now."""
        chunk = Chunk()
        with contextlib.suppress(TimeoutError, EngineLost, BoundaryError):
            async with asyncio.timeout(0):
                while chunk.finish is None:
                    chunk = await _next_chunk(stream, seat)
        if chunk.kv is not None and (kept := self._kept_of(chunk.kv, seat)) is not None:
            kept.let_go()

    async def _kept_for(self, seat: Seat) -> KVRef | None:
        """A request that turned back finds its prefix in the engine's own cache, once released."""
        kept = self._kept
        if kept is None:
            return None
        if not kept.is_of(seat):
            return kept.offer(seat)
        self._keep_instead(None)
        assert kept.ending is not None, "let go of"
        await asyncio.wait([kept.ending], timeout=TURNED_BACK_S)
        return None

    def _checked(self, chunk: Chunk, request: GenerateRequest) -> Chunk:
        """What an engine says of itself is not believed: ids that are none or numbers that cannot
        be log probabilities end the part, more than was asked for ends the turn."""
        if chunk.kv is not None and not self._is_kept_prefix(chunk, chunk.kv):
            chunk = msgspec.structs.replace(chunk, kv=None)
        if chunk.taken is not None:
            wrong = "acknowledges a prefix that it was not offered"
            if request.kv is not None:
                wrong = wrong_with(chunk.taken, request.kv)
            if wrong:
                return Chunk(finish=Finish.ERROR, reason=wrong)
        if len(chunk.ids) != len(chunk.logprobs):
            return Chunk(finish=Finish.ERROR, reason="ids and log probabilities differ in number")
        if not all(0 <= token < self._plan.num_ids for token in chunk.ids):
            return Chunk(finish=Finish.ERROR, reason="an id that is not in the vocabulary")
        if not all(_MIN_LOGPROB < one <= _MAX_LOGPROB for one in chunk.logprobs):
            return Chunk(finish=Finish.ERROR, reason="a log probability that cannot be one")
        num_left = self._num_left()
        if len(chunk.ids) <= num_left:
            return chunk
        ids, logprobs = chunk.ids[:num_left], chunk.logprobs[:num_left]
        return msgspec.structs.replace(chunk, ids=ids, logprobs=logprobs, finish=Finish.LENGTH)

    def _is_kept_prefix(self, chunk: Chunk, ref: KVRef) -> bool:
        """Only what is frozen is kept, and no more of it than there is."""
        num_tokens = len(self._plan.request.prompt_ids) + len(self.sampled.ids) + len(chunk.ids)
        is_ours = ref.execution == self._plan.request.execution
        is_prefix = 0 < ref.num_tokens <= num_tokens
        return chunk.finish is Finish.FROZEN and is_ours and is_prefix

    async def _next_seat(self) -> Seat:
        execution = self._plan.request.execution
        seat = self._routing.open_seat(execution)
        if seat is not None and self._num_failures == 0:
            return seat
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if self._num_failures == 0 or self._stuck_since_s is None:
            self._stuck_since_s = began_s
        limit_s = self._stuck_since_s + self._plan.hold_max_s - began_s
        try:
            with self._routing.hold(execution):
                await asyncio.sleep(min(self._backoff_s(), max(0.0, limit_s)))
                if limit_s <= 0 or self._num_parts >= MAX_PARTS:
                    raise NoEngine(execution, self._plan.hold_max_s)
                return await self._routing.wait_open(execution, limit_s=limit_s)
        finally:
            self.sampled.held_s += loop.time() - began_s

    def _backoff_s(self) -> float:
        if self._num_failures == 0:
            return 0.0
        return float(min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(self._num_failures - 1, 10)))

    def _is_stopped(self) -> bool:
        """Cut between the stop id and the terminal chunk: there is nothing to continue."""
        ids = self.sampled.ids
        return bool(ids) and ids[-1] in self._plan.request.stop_ids

    def _num_left(self) -> int:
        return self._plan.request.max_new_tokens - len(self.sampled.ids)

    def _next_request(self, seat: Seat, kv: KVRef | None) -> GenerateRequest:
        self._num_parts += 1
        whole = self._plan.request
        return msgspec.structs.replace(
            whole,
            request_id=f"{whole.request_id}.i{seat.incarnation}.p{self._num_parts}",
            prompt_ids=whole.prompt_ids + self.sampled.ids,
            max_new_tokens=self._num_left(),
            kv=kv,
        )

    def _tell(self, moved: tuple[str, str], to_engine: str) -> None:
        self.sampled.num_continuations += 1
        self._on_continued(
            Continued(
                execution=self._plan.request.execution,
                turn=self._plan.turn,
                attempt=self._plan.attempt,
                from_engine=moved[0],
                to_engine=to_engine,
                reason=moved[1],
                num_tokens_so_far=len(self.sampled.ids),
            )
        )


async def _next_chunk(stream: AsyncIterator[Chunk], seat: Seat) -> Chunk:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise EngineLost(seat.engine_id, "ended a stream without saying how") from None


async def _cancel(seat: Seat, request_id: str) -> None:
    """Ask and confirm; an engine that does not answer in the grace is its supervisor's case."""
    with contextlib.suppress(TimeoutError, BoundaryError):
        async with asyncio.timeout(CANCEL_GRACE_S):
            await seat.engine.cancel(request_id)
