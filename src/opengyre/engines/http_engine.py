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
from opengyre.seams.engine import Chunk, EngineCaps, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.transport.chunk_stream import ChunkReader, ChunkStream

MAX_REQUESTS = 8192
SILENCE_MAX_S = 600.0
CALL_TIMEOUT_S = 10.0
_MAX_REASON_BYTES = 500
_DONE = b"[DONE]"
_OK = 200

ReadEvent = Callable[[bytes], Chunk]
"""The new ids of one event, its finish and reason. Raises BoundaryError if it makes no sense."""


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
    """One request on its way. `on_trouble(reason)` for a failure that is not the request's."""

    def __init__(
        self,
        stream: ChunkStream,
        read: ReadEvent,
        version: int,
        *,
        on_trouble: Callable[[str], None],
    ) -> None:
        self.stream = stream
        self.connection: HttpConnection | None = None
        self.last_s = asyncio.get_running_loop().time()
        self._read = read
        self._version = version
        self._on_trouble = on_trouble
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
        if status in (0, _OK) or status >= 500:
            self._on_trouble(failure)
        self._end(Finish.ERROR, failure or "the answer ended without saying how")

    def stop(self, finish: Finish, reason: str = "") -> None:
        """End the stream here and cut the connection."""
        self._end(finish, reason)
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

    def _end(self, finish: Finish, reason: str) -> None:
        self.stream.end(finish, policy_version=self._version, reason=reason)


class HttpEngine:
    """Use as `async with HttpEngine(...) as engine`. A `RequestEngine`.

    `troubled` is set when a connection failed or the server failed a request: somebody should
    look whether it lives (`is_alive`). `num_running` counts requests that have not ended. A request
    that hears nothing for `silence_max_s` is cut.
    """

    def __init__(
        self,
        origin: Origin,
        wire: TokenWire,
        facts: ServerFacts,
        *,
        silence_max_s: float = SILENCE_MAX_S,
    ) -> None:
        self.origin = origin
        self.wire = wire
        self.troubled = asyncio.Event()
        self.trouble = ""
        self._facts = facts
        self._silence_max_s = silence_max_s
        self._pool = HttpPool(origin)
        self._calls: dict[str, _Call] = {}
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
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._pool.close()

    @property
    def num_running(self) -> int:
        return len(self._calls)

    def submit(self, request: GenerateRequest) -> ChunkReader:
        """Sent at once. `aclose`, or dropping the reader, cancels it."""
        stream = ChunkStream()
        request_id = request.request_id
        room = self._facts.context_tokens - len(request.prompt_ids)
        num_tokens = min(request.max_new_tokens, room)
        refusal = self._refusal(request, room)
        version = self._facts.policy_version
        if refusal:
            stream.end(Finish.ERROR, policy_version=version, reason=refusal)
        elif num_tokens <= 0:
            stream.end(Finish.LENGTH, policy_version=version)
        else:
            call = _Call(stream, self.wire.reader(), version, on_trouble=self._on_trouble)
            self._calls[request_id] = call
            asked = msgspec.structs.replace(request, max_new_tokens=num_tokens)
            self._tasks.create_task(self._serve(asked, call))
        return ChunkReader(stream, on_abandon=lambda: self._abandon(request_id, stream))

    async def freeze(self, request_id: str) -> None:
        await self._stop(request_id, Finish.FROZEN)

    async def freeze_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for request_id in list(self._calls):
                tasks.create_task(self._stop(request_id, Finish.FROZEN))

    async def cancel(self, request_id: str) -> None:
        await self._stop(request_id, Finish.CANCELLED)

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

    async def _serve(self, request: GenerateRequest, call: _Call) -> None:
        """Until the stream ended, whoever ended it."""
        try:
            await self._send(request, call)
            await self._watch(call)
        finally:
            if self._calls.get(request.request_id) is call:
                del self._calls[request.request_id]

    async def _watch(self, call: _Call) -> None:
        """Cut a request that hears nothing for too long."""
        while not call.stream.is_ended:
            heard_s = call.last_s
            try:
                async with asyncio.timeout_at(heard_s + self._silence_max_s):
                    await call.stream.wait_ended()
            except TimeoutError:
                if call.last_s == heard_s:
                    self._on_trouble("it is silent")
                    call.stop(Finish.ERROR, f"nothing came in {self._silence_max_s:g} s")

    async def _send(self, request: GenerateRequest, call: _Call) -> None:
        body = self.wire.body(request)
        try:
            connection = await self._pool.connection()
        except BoundaryError as error:
            self._on_trouble(error.reason)
            call.stop(Finish.ERROR, error.reason)
            return
        if call.stream.is_ended:
            connection.close()
            return
        call.connection = connection
        connection.send(self._pool.request("POST", self.wire.path, body), call)

    async def _stop(self, request_id: str, finish: Finish) -> None:
        call = self._calls.get(request_id)
        if call is None or call.stream.is_ended:
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

    def _abandon(self, request_id: str, stream: ChunkStream) -> None:
        call = self._calls.get(request_id)
        if call is not None and call.stream is stream and not stream.is_ended:
            self._tasks.create_task(self._stop(request_id, Finish.CANCELLED))

    def _refusal(self, request: GenerateRequest, room: int) -> str:
        known = self._calls.get(request.request_id)
        if known is not None and not known.stream.is_ended:
            return f"request {request.request_id} is already here"
        if len(self._calls) >= MAX_REQUESTS:
            return f"engine is full: {len(self._calls)} requests are under way"
        if not request.prompt_ids:
            return "the prompt is empty"
        if room < 0:
            num, limit = len(request.prompt_ids), self._facts.context_tokens
            return f"a prompt of {num} tokens exceeds the context of {limit}"
        return ""

    def _on_trouble(self, reason: str) -> None:
        self.trouble = reason
        self.troubled.set()
