"""The asyncio half that the engines of this process share: who waits, who runs, who must stop.

Owns: admission, the driver loop, freeze and cancel acknowledgement, pausing, routability during
an update. Must not know: how tokens are made, what is pinned; that is the `Stepper`.
Invariants: lives change only between two steps; a stopped request gets no token after its
terminal chunk; nothing steps while paused; an engine in an update, or broken by a failed step or
update, answers each request with an `error` chunk until a full load was committed.
The driver task lives only while something waits or runs, so an idle engine holds no task.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from opengyre.engines.requests import misfit
from opengyre.seams.engine import Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVTaken
from opengyre.transport.chunk_stream import ChunkReader, ChunkStream

STEP_DEADLINE_S = 120.0
NO_PLACE = "no place is free to run it now"
logger = logging.getLogger(__name__)


class Live:
    """A request in the engine. `num_left` new tokens may still be sampled for it: none, and its
    `kv` is cached and nothing else. It `is_ready` once that can be read without waiting; `keeps_kv`
    says whether it is pinned when it leaves frozen."""

    __slots__ = (
        "ids",
        "is_ready",
        "keeps_kv",
        "num_left",
        "request",
        "stop_ids",
        "stream",
        "wanted_end",
    )

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.stream = ChunkStream()
        self.ids: list[int] = list(request.prompt_ids)
        self.num_left = request.max_new_tokens
        self.stop_ids = frozenset(request.stop_ids)
        self.wanted_end: Finish | None = None
        self.is_ready = request.kv is None
        self.keeps_kv = False

    def decline(self, ref: KVRef, reason: str) -> None:
        """Nothing of `ref` will be read: it is computed as if it had not been offered."""
        self.stream.put_taken(KVTaken(ref=ref.ref, num_tokens=0, reason=reason))
        self.request = msgspec.structs.replace(self.request, kv=None)
        self.is_ready = True


class Sampled:
    """What one step made for one live: what became of its `kv`, then ids with logprobs; `finish`
    if it ends by itself."""

    __slots__ = ("finish", "ids", "live", "logprobs", "reason", "taken")

    def __init__(
        self,
        live: Live,
        ids: list[int],
        logprobs: list[float],
        *,
        finish: Finish | None = None,
        reason: str = "",
        taken: KVTaken | None = None,
    ) -> None:
        self.live = live
        self.ids = ids
        self.logprobs = logprobs
        self.finish = finish
        self.reason = reason
        self.taken = taken


class Stepper(Protocol):
    """Makes tokens. All but `step` are called on the event loop; `pin` and `forget` between steps
    only."""

    async def step(self, lives: Sequence[Live]) -> list[Sampled]: ...

    def expect(self, live: Live, on_ready: Callable[[], None]) -> None:
        """A live with a `kv` waits; `on_ready` is called once it can be admitted."""
        ...

    def pin(self, live: Live) -> KVRef | None:
        """Keep what is cached of a live that leaves; None if nothing is kept. `forget` follows."""
        ...

    def forget(self, live: Live) -> None:
        """Once for each live that leaves, or waits again."""
        ...


class Desk:
    """Drives a Stepper. All methods run on one event loop."""

    def __init__(
        self,
        stepper: Stepper,
        *,
        max_running: int,
        max_waiting: int,
        context_tokens: int,
        version: int,
        num_ids: int | None = None,
    ) -> None:
        self.version = version
        self.num_generated_tokens = 0
        self.is_routable = True
        self.failure = ""
        self._stepper = stepper
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._context_tokens = context_tokens
        self._num_ids = num_ids
        self._waiting: dict[str, Live] = {}
        self._running: dict[str, Live] = {}
        self._driver: asyncio.Task[None] | None = None
        self._is_paused = False
        self._is_stepping = False
        self._step_done = asyncio.Event()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerateRequest) -> ChunkReader:
        """Queue a request. Never raises: what is not taken ends by an error or refused chunk."""
        live = Live(request)
        never = misfit(request, context_tokens=self._context_tokens, num_ids=self._num_ids)
        if refusal := self._refusal(request):
            live.stream.end(Finish.ERROR, policy_version=self.version, reason=refusal)
        elif never:
            live.stream.end(Finish.REFUSED, policy_version=self.version, reason=never)
        else:
            self._queue(live)
        return ChunkReader(live.stream, on_abandon=lambda: self._give_up(live))

    def _queue(self, live: Live) -> None:
        """An engine that keeps a prefix waits for its reader: where no place is free, it is told at
        once that nothing is read."""
        if live.request.kv is not None and self._has_no_place():
            live.decline(live.request.kv, NO_PLACE)
        if self._is_over(live):
            live.stream.end(Finish.LENGTH, policy_version=self.version)
            return
        self._waiting[live.request.request_id] = live
        if live.request.kv is not None:
            self._stepper.expect(live, lambda: self._ready(live))
        self._wake()

    async def stop(self, request_id: str, finish: Finish, *, keeps_kv: bool = False) -> None:
        """End one request at a token boundary; unknown ids are fine."""
        live = self._waiting.get(request_id) or self._running.get(request_id)
        if live is not None:
            self._want_end(live, finish, keeps_kv=keeps_kv)
            await _soon(live.stream.wait_ended(), "the step of a stopped request")

    async def stop_all(self, finish: Finish, *, keeps_kv: bool = False) -> None:
        lives = [*self._waiting.values(), *self._running.values()]
        for live in lives:
            self._want_end(live, finish, keeps_kv=keeps_kv)
        for live in lives:
            await _soon(live.stream.wait_ended(), "the step of a stopped request")

    async def pause(self) -> None:
        self._is_paused = True
        while self._is_stepping:
            await _soon(self._step_done.wait(), "the step in flight")

    def resume(self) -> None:
        """Raises BoundaryError while no verified weights are loaded."""
        if not self.is_routable:
            reason = "cannot resume: no update was committed since the last one began"
            raise BoundaryError("engine", reason, retryable=False)
        self._is_paused = False
        self._wake()

    def begin_update(self) -> None:
        """From here the engine is unroutable; lives of the old version wait to be recomputed."""
        if not self._is_paused:
            raise BoundaryError("engine", "weights change only while paused", retryable=False)
        self.is_routable = False
        requeued, self._running = self._running, {}
        for live in requeued.values():
            self._stepper.forget(live)
        self._waiting = {**requeued, **self._waiting}

    def is_of_nobody(self, execution: str) -> bool:
        """Nothing of this execution runs or waits."""
        lives = [*self._waiting.values(), *self._running.values()]
        return all(live.request.execution != execution for live in lives)

    def commit_update(self, version: int) -> None:
        self.version = version
        self.is_routable = True
        self.failure = ""

    def _refusal(self, request: GenerateRequest) -> str:
        known = request.request_id in self._waiting or request.request_id in self._running
        if not self.is_routable:
            return "engine is unroutable: no verified weights"
        if known:
            return f"request {request.request_id} is already here"
        if len(self._waiting) >= self._max_waiting:
            return f"engine is full: {len(self._waiting)} requests wait"
        return ""

    def _has_no_place(self) -> bool:
        return len(self._running) + len(self._waiting) >= self._max_running

    def _is_over(self, live: Live) -> bool:
        """It asks for no token, or for none that fits."""
        if live.num_left <= 0 and live.request.kv is not None:
            return False
        return live.num_left <= 0 or len(live.ids) >= self._context_tokens

    def _ready(self, live: Live) -> None:
        live.is_ready = True
        self._wake()

    def _give_up(self, live: Live) -> None:
        if not live.stream.is_ended:
            self._want_end(live, Finish.CANCELLED)

    def _want_end(self, live: Live, finish: Finish, *, keeps_kv: bool = False) -> None:
        if live.wanted_end is None:
            live.wanted_end, live.keeps_kv = finish, keeps_kv
        if live.request.request_id in self._waiting or not self._is_stepping:
            self._end(live, live.wanted_end)

    def _end(self, live: Live, finish: Finish, reason: str = "") -> None:
        request_id, kv = live.request.request_id, None
        if self._waiting.get(request_id) is live:
            del self._waiting[request_id]
            self._stepper.forget(live)
        elif self._running.get(request_id) is live:
            del self._running[request_id]
            if finish is Finish.FROZEN and live.keeps_kv:
                kv = self._stepper.pin(live)
            self._stepper.forget(live)
        live.stream.end(finish, policy_version=self.version, reason=reason, kv=kv)

    def _wake(self) -> None:
        is_idle = self._driver is None or self._driver.done()
        if is_idle and not self._is_paused and (self._waiting or self._running):
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Ends when there is nothing to do now; whoever changes that wakes it."""
        try:
            while not self._is_paused and self._admit():
                self._deliver(await self._step())
        except Exception as error:
            logger.exception("a step of the engine failed; it needs a full load")
            self._break(f"{type(error).__name__}: {error}")

    def _admit(self) -> bool:
        """In order of arrival, but for who is not ready. True if anything runs."""
        num_free = self._max_running - len(self._running)
        ready = (live for live in self._waiting.values() if live.is_ready)
        for live in list(itertools.islice(ready, max(0, num_free))):
            request_id = live.request.request_id
            self._running[request_id] = self._waiting.pop(request_id)
        return bool(self._running)

    async def _step(self) -> list[Sampled]:
        self._is_stepping = True
        self._step_done.clear()
        try:
            return await self._stepper.step(list(self._running.values()))
        finally:
            self._is_stepping = False
            self._step_done.set()

    def _deliver(self, made: list[Sampled]) -> None:
        for one in made:
            live, num = one.live, len(one.ids)
            if one.taken is not None:
                live.stream.put_taken(one.taken)
            if one.ids:
                live.stream.put(one.ids, one.logprobs, self.version)
            live.ids += one.ids
            live.num_left -= num
            self.num_generated_tokens += num
            finish = one.finish or (self._own_end(live, one.ids) if one.ids else None)
            if finish is not None:
                self._end(live, finish, one.reason)
        for live in [live for live in self._running.values() if live.wanted_end]:
            assert live.wanted_end is not None
            self._end(live, live.wanted_end)

    def _own_end(self, live: Live, ids: list[int]) -> Finish | None:
        if ids and ids[-1] in live.stop_ids:
            return Finish.STOP
        if live.num_left <= 0 or len(live.ids) >= self._context_tokens:
            return Finish.LENGTH
        return None

    def _break(self, reason: str) -> None:
        self.is_routable = False
        self.failure = reason
        self._is_paused = True
        for live in [*self._waiting.values(), *self._running.values()]:
            self._end(live, Finish.ERROR, reason)


async def _soon(wait: Coroutine[Any, Any, object], what: str) -> None:
    try:
        async with asyncio.timeout(STEP_DEADLINE_S):
            await wait
    except TimeoutError as error:
        reason = f"{what} did not end in {STEP_DEADLINE_S:g} s"
        raise BoundaryError("engine", reason, retryable=False) from error
