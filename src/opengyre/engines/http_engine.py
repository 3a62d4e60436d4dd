"""A rollout engine in another program, reached by HTTP: token ids out, ids and logprobs back.

Owns: requests, their end, what counts as a failure. Must not know: whose server it is (that is a
`TokenWire`), sessions, weights. Invariants: each request gets exactly one terminal chunk; a cut
stream, a refusal, or an answer that does not add up is an `error` chunk with its reason; nothing
is written to a stream after a freeze or cancel returned, and the server is told to stop.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import msgspec

from opengyre.engines.http_stream import EventLines, HttpConnection, HttpPool, Origin
from opengyre.engines.requests import misfit
from opengyre.seams.engine import Chunk, EngineCaps, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVRelease, KVTaken
from opengyre.transport.chunk_stream import ChunkReader, ChunkStream

MAX_REQUESTS = 8192
SILENCE_MAX_S = 600.0
DOUBT_AFTER_S = 20.0
CALL_TIMEOUT_S = 10.0
_MAX_REASON_BYTES = 500
_DONE = b"[DONE]"
_MIN_TEMPERATURE = 1e-5
_MAX_TOP_K = 2**30
_OK = 200
_REFUSALS = (400, 413, 422)

ReadEvent = Callable[[bytes], Chunk]
"""The new ids of one event, its finish and reason. Raises BoundaryError if it makes no sense."""


def sampling_numbers(request: GenerateRequest) -> dict[str, float]:
    """Temperature, top_p, top_k (-1: all) and min_p within what servers take: a distribution cut to
    its most likely token is greedy sampling, and a top_k beyond every vocabulary fits 32 bits."""
    is_greedy = request.top_p <= 0.0 or request.temperature < _MIN_TEMPERATURE
    return {
        "temperature": 0.0 if is_greedy else request.temperature,
        "top_p": 1.0 if is_greedy else request.top_p,
        "top_k": min(request.top_k, _MAX_TOP_K) or -1,
        "min_p": 0.0 if is_greedy else request.min_p,
    }


class TokenWire(Protocol):
    """How one kind of server is asked. `path` takes `body(request)` and streams events."""

    kind: str
    path: str

    def body(self, request: GenerateRequest) -> bytes: ...

    def reader(self) -> ReadEvent:
        """A reader for one answer's events."""
        ...

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        """Path and body of the call that stops a request; None: closing the connection does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What is known of a server. `policy_version` is stamped on all its tokens."""

    context_tokens: int
    logprob_mode: str
    policy_version: int = 0


class _Call:
    """One request on its way. `on_over(trouble)` is called once, when its stream ended; `trouble`
    are words if it failed through no fault of its own."""

    def __init__(
        self, read: ReadEvent, version: int, *, on_over: Callable[["_Call", str], None]
    ) -> None:
        self.stream = ChunkStream()
        self.connection: HttpConnection | None = None
        self.last_s = asyncio.get_running_loop().time()
        self._read = read
        self._version = version
        self._on_over = on_over
        self._lines = EventLines()
        self._refusal = bytearray()

    def on_body(self, status: int, data: bytes) -> None:
        if status != _OK:
            self._refusal += data[: _MAX_REASON_BYTES - len(self._refusal)]
            return
        self.last_s = asyncio.get_running_loop().time()
        try:
            for event in self._lines.feed(data):
                if event != _DONE:
                    self._take(self._read(event))
        except BoundaryError as error:
            self.stop(Finish.ERROR, error.reason)

    def on_end(self, status: int, failure: str) -> None:
        if self.stream.is_ended:
            return
        if not failure and status != _OK:
            failure = f"HTTP {status}: {self._refusal.decode(errors='replace')}"
        reason = failure or "the answer ended without saying how"
        is_theirs = status in (0, _OK) or status >= 500
        finish = Finish.REFUSED if status in _REFUSALS else Finish.ERROR
        self._end(finish, reason, trouble=reason if is_theirs else "")

    def stop(self, finish: Finish, reason: str = "", *, trouble: str = "") -> None:
        """End the stream here and cut the connection."""
        self._end(finish, reason, trouble=trouble)
        if self.connection is not None:
            self.connection.close()

    def _take(self, chunk: Chunk) -> None:
        if chunk.ids:
            if len(chunk.logprobs) != len(chunk.ids):
                what = f"{len(chunk.ids)} ids came with {len(chunk.logprobs)} logprobs"
                raise BoundaryError("engine", what, retryable=False)
            if not all(map(math.isfinite, chunk.logprobs)):
                raise BoundaryError("engine", "a logprob is not finite", retryable=False)
            self.stream.put(chunk.ids, chunk.logprobs, self._version)
        if chunk.finish is not None:
            self._end(chunk.finish, chunk.reason)

    def _end(self, finish: Finish, reason: str, *, trouble: str = "") -> None:
        if not self.stream.is_ended:
            self.stream.end(finish, policy_version=self._version, reason=reason)
            self._on_over(self, trouble)


class HttpEngine:
    """Use as `async with HttpEngine(...) as engine`. A `RequestEngine`.

    `troubled` is set when a connection failed, the server failed a request, or one has heard
    nothing for `doubt_after_s`: somebody should look whether it lives (`is_alive`). `num_running`
    counts requests that have not ended. A request that hears nothing for `silence_max_s` is cut.
    """

    def __init__(
        self,
        origin: Origin,
        wire: TokenWire,
        facts: ServerFacts,
        *,
        silence_max_s: float = SILENCE_MAX_S,
        doubt_after_s: float = DOUBT_AFTER_S,
    ) -> None:
        self.origin = origin
        self.wire = wire
        self.troubled = asyncio.Event()
        self.trouble = ""
        self._facts = facts
        self._silence_max_s = silence_max_s
        self._doubt_after_s = doubt_after_s
        self._pool = HttpPool(origin)
        self._calls: dict[str, _Call] = {}
        self._listening: asyncio.TimerHandle | None = None
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Requests that still run are cancelled."""
        for call in list(self._calls.values()):
            call.stop(Finish.CANCELLED)
        if self._listening is not None:
            self._listening.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._pool.close()

    @property
    def num_running(self) -> int:
        return len(self._calls)

    def submit(self, request: GenerateRequest) -> ChunkReader:
        """Sent at once. `aclose`, or dropping the reader, cancels it."""
        room = self._facts.context_tokens - len(request.prompt_ids)
        asked = msgspec.structs.replace(request, max_new_tokens=min(request.max_new_tokens, room))
        call = self._call(request.request_id)
        never = misfit(request, context_tokens=self._facts.context_tokens)
        if refusal := self._refusal(request):
            call.stop(Finish.ERROR, refusal)
        elif never:
            call.stop(Finish.REFUSED, never)
        elif asked.max_new_tokens <= 0:
            call.stop(Finish.LENGTH)
        else:
            self._calls[request.request_id] = call
            self._begin(asked, call)
        return ChunkReader(call.stream, on_abandon=lambda: self._abandon(request.request_id, call))

    async def freeze(self, request_id: str, *, keeps_kv: bool = False) -> None:
        """Nothing is kept: a server pins for its own kind only."""
        del keeps_kv
        await self._stop(request_id, Finish.FROZEN)

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        del keeps_kv
        async with asyncio.TaskGroup() as tasks:
            for request_id in list(self._calls):
                tasks.create_task(self._stop(request_id, Finish.FROZEN))

    async def cancel(self, request_id: str) -> None:
        await self._stop(request_id, Finish.CANCELLED)

    async def import_kv(self, ref: KVRef) -> KVTaken:
        return KVTaken(ref=ref.ref, num_tokens=0, reason=f"{self.wire.kind} reads no prefixes")

    async def release_kv(self, ref: str) -> KVRelease:
        del ref
        return KVRelease.UNKNOWN

    def caps(self) -> EngineCaps:
        return EngineCaps(
            engine=self.wire.kind,
            logprob_mode=self._facts.logprob_mode,
            is_resume_exact=False,
            can_export_kv=False,
            weight_path="none",
            context_tokens=self._facts.context_tokens,
        )

    async def is_alive(self) -> bool:
        """Whether it answers at all; clears `troubled`."""
        self.troubled.clear()
        try:
            status, _ = await self._pool.call("GET", "/v1/models", timeout_s=CALL_TIMEOUT_S)
        except BoundaryError as error:
            self.trouble = error.reason
            return False
        return status == _OK

    def _call(self, request_id: str) -> _Call:
        def on_over(call: _Call, trouble: str) -> None:
            if self._calls.get(request_id) is call:
                del self._calls[request_id]
            if trouble:
                self.trouble = trouble
                self.troubled.set()

        return _Call(self.wire.reader(), self._facts.policy_version, on_over=on_over)

    def _begin(self, request: GenerateRequest, call: _Call) -> None:
        """At once where a connection is free."""
        sent = self._pool.request("POST", self.wire.path, self.wire.body(request))
        call.connection = self._pool.free_connection()
        if call.connection is not None:
            call.connection.send(sent, call)
        else:
            self._tasks.create_task(self._connect(sent, call))
        if self._listening is None:
            self._listen()

    async def _connect(self, sent: bytes, call: _Call) -> None:
        try:
            connection = await self._pool.connection()
        except BoundaryError as error:
            call.stop(Finish.ERROR, error.reason, trouble=error.reason)
            return
        if call.stream.is_ended:
            connection.close()
            return
        call.connection = connection
        connection.send(sent, call)

    def _listen(self) -> None:
        """While requests run: cut those that heard nothing for too long."""
        loop = asyncio.get_running_loop()
        for call in list(self._calls.values()):
            silent_s = loop.time() - call.last_s
            if silent_s >= self._silence_max_s:
                reason = f"nothing came in {self._silence_max_s:g} s"
                call.stop(Finish.ERROR, reason, trouble=reason)
            elif silent_s >= self._doubt_after_s:
                self.trouble = f"nothing came in {silent_s:.0f} s"
                self.troubled.set()
        every_s = min(self._silence_max_s / 4, self._doubt_after_s / 2)
        self._listening = loop.call_later(every_s, self._listen) if self._calls else None

    async def _stop(self, request_id: str, finish: Finish) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return
        is_sent = call.connection is not None
        call.stop(finish)
        if is_sent:
            await self._tell_abort(request_id)

    async def _tell_abort(self, request_id: str) -> None:
        """The connection is cut already: a server that does not answer stops by itself."""
        told = self.wire.abort(request_id)
        if told is not None:
            with contextlib.suppress(BoundaryError):
                await self._pool.call("POST", *told, timeout_s=CALL_TIMEOUT_S)

    def _abandon(self, request_id: str, call: _Call) -> None:
        if self._calls.get(request_id) is call:
            self._tasks.create_task(self._stop(request_id, Finish.CANCELLED))

    def _refusal(self, request: GenerateRequest) -> str:
        if request.request_id in self._calls:
            return f"request {request.request_id} is already here"
        if len(self._calls) >= MAX_REQUESTS:
            return f"engine is full: {len(self._calls)} requests are under way"
        return ""
