"""The gateway as the runtime sees it: sessions, doors, routes, and one HTTP address.

Owns: wiring and the life of a session. Must not know: processes, the controller, the run folder.
Invariants: a turn is told only after its record is durable; `close_session` returns after every
turn of it was told; a closed session's key opens nothing.
"""

import asyncio
import hashlib
import hmac
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from opengyre.gateway import body as bodies
from opengyre.gateway.app import Asked, GatewayApp, Surface
from opengyre.gateway.connection import ClientLeft, Connection
from opengyre.gateway.continuation import Continued, Generation, GenerationPlan
from opengyre.gateway.dialects.dialect import AnswerForm
from opengyre.gateway.exchange import Exchange, ExchangeParts
from opengyre.gateway.handoffs import Handoff, Handoffs
from opengyre.gateway.labels import Evidence, LabelRule, role_of
from opengyre.gateway.recording import RecordQueue
from opengyre.gateway.rendering.renderer import ModelRenderer
from opengyre.gateway.request import Refusal, RefusalKind, Sampling
from opengyre.gateway.restoring import NOTHING_EARLIER, Earlier, restore_session
from opengyre.gateway.room import NoRoom, Room
from opengyre.gateway.routing import Routing
from opengyre.gateway.server import bind, serve_gateway
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Attempt, Incoming
from opengyre.seams.engine import GenerateRequest, RequestEngine
from opengyre.seams.kv import KVRef
from opengyre.seams.recorder import Recorder
from opengyre.seams.records import TurnRecord

MAX_RUNNING_PER_SESSION = 64
CLOSE_TIMEOUT_S = 30.0
ROOM_TIMEOUT_S = 60.0
MAX_LONG_BODIES_BYTES = 4 * bodies.MAX_BODY_BYTES
_LONG_BODY_BYTES = 2**20
_OFF_LOOP_BYTES = 65_536
_NUM_THREADS = 2
_NO_KEY = "-"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """For what a client does not say. `max_new_tokens` None: up to the context's end."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """`model` is the name that `/v1/models` tells; `labels` tell the role of a call;
    `watched` is counted in the calls of answers. `sock`: bound already, instead of `host` and
    `port`."""

    max_context_tokens: int
    host: str = "127.0.0.1"
    port: int = 0
    hold_comment_s: float = 8.0
    hold_max_s: float = 240.0
    head_timeout_s: float = 30.0
    sock: socket.socket | None = None
    model: str = "policy"
    defaults: SamplingDefaults = SamplingDefaults()
    labels: tuple[LabelRule, ...] = ()
    watched: re.Pattern[str] | None = None


async def _ignore(execution: str, keys: list[str]) -> None:
    """Nobody opens sessions on demand."""


def _tell_nobody(told: Handoff) -> None:
    """Nobody keeps a journal of handoffs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayEvents:
    """Called on the event loop, must not block. `on_hold(execution, started)` tells the first
    held request of an execution and the end of the last one. `on_unknown(execution, keys)` is
    waited for: a call of no open session came with these keys; it may open one."""

    on_turn: Callable[[TurnRecord], None]
    on_hold: Callable[[str, bool], None]
    on_continued: Callable[[Continued], None]
    on_unknown: Callable[[str, list[str]], Awaitable[None]] = _ignore
    on_handoff: Callable[[Handoff], None] = _tell_nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCounts:
    """`num_turns` were admitted, retries not counted; `num_cancelled` still ran at the close."""

    num_turns: int
    num_cancelled: int


@dataclass(slots=True, kw_only=True)
class _Open:
    session: Session
    key: str
    seed: int
    running: dict[Exchange, None] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    room: Room = field(default_factory=lambda: Room(bodies.MAX_BODY_BYTES))


class Gateway:
    """Use as `async with Gateway(...) as gateway`; a record that cannot be written ends it."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        renderer: ModelRenderer,
        recorder: Recorder,
        events: GatewayEvents,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        renderer.limit(settings.max_context_tokens)
        self._events = events
        self._now_s = now_s
        self._records = RecordQueue(recorder, on_turn=events.on_turn)
        self._routing = Routing(on_hold=events.on_hold)
        self._handoffs = Handoffs(self._routing, on_handoff=events.on_handoff)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="bodies")
        self._room = Room(MAX_LONG_BODIES_BYTES)
        self._engine_tokens = settings.max_context_tokens
        self._open: dict[str, _Open] = {}
        self._stack = AsyncExitStack()
        self.host = settings.host
        self.port = settings.port

    async def __aenter__(self) -> Self:
        """Raises ConfigError when the address cannot be had."""
        surface = Surface(
            is_allowed=self._is_allowed,
            complete=self._complete,
            count_tokens=self._count_tokens,
            model=self._settings.model,
            created_s=int(time.time()),
        )
        sock = self._settings.sock or bind(self._settings.host, self._settings.port)
        self.host, self.port = sock.getsockname()[:2]
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            worker = tasks.create_task(self._records.run())
            stack.callback(worker.cancel)
            await stack.enter_async_context(self._handoffs)
            await stack.enter_async_context(
                serve_gateway(
                    GatewayApp(surface), sock, head_timeout_s=self._settings.head_timeout_s
                )
            )
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            stack.push_async_callback(self._close_all)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    @property
    def address(self) -> str:
        """`http://host:port`; an execution's base URL is `{address}/{execution}/v1`."""
        return f"http://{self.host}:{self.port}"

    # ---- sessions

    def open_session(
        self,
        execution: str,
        key: str,
        engine_id: str,
        *,
        seed: int,
        earlier: Earlier = NOTHING_EARLIER,
    ) -> list[str]:
        """From now on `key` opens `/{execution}/`. Raises ValueError if it is open already.

        The session goes on from what is known of `earlier`; returns one line for each record of
        it that could not be restored.
        """
        session, problems = self.restored(execution, earlier)
        self.open_restored(session, key, engine_id, seed=seed)
        return problems

    def restored(self, execution: str, earlier: Earlier) -> tuple[Session, list[str]]:
        """A session that is not open yet; may take long, and may run in another thread."""
        session = Session(
            execution=execution,
            renderer=self._renderer,
            max_context_tokens=self._engine_tokens,
        )
        return session, restore_session(session, earlier)

    def open_restored(self, session: Session, key: str, engine_id: str, *, seed: int) -> None:
        """Raises ValueError if its execution has an open session."""
        if session.execution in self._open:
            raise ValueError(f"{session.execution} has an open session")
        session.max_context_tokens = self._engine_tokens
        self._open[session.execution] = _Open(session=session, key=key, seed=seed)
        self._routing.set_routes({session.execution: engine_id})

    async def close_session(self, execution: str) -> SessionCounts:
        """Revoke the key, cut its clients off, cancel at the engines, tell every turn.

        Unknown executions are fine. Raises BoundaryError when records cannot be synced.
        """
        one = self._open.pop(execution, None)
        if one is None:
            return SessionCounts(num_turns=0, num_cancelled=0)
        num_cancelled = len(one.running)
        for exchange in one.running:
            exchange.abort()
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            while one.running:
                one.idle.clear()
                await one.idle.wait()
        await self._handoffs.settle(execution)
        self._routing.forget(execution)
        await self._records.drained()
        return SessionCounts(num_turns=one.session.num_turns, num_cancelled=num_cancelled)

    async def _close_all(self) -> None:
        for execution in list(self._open):
            await self.close_session(execution)
        await self._records.drained()

    # ---- engines, doors and routes

    def connect_engine(self, engine_id: str, engine: RequestEngine, incarnation: int) -> None:
        """A new life of an engine; its door is open. No turn may outgrow the smallest context."""
        self._engine_tokens = min(self._engine_tokens, engine.caps().context_tokens)
        for one in self._open.values():
            one.session.max_context_tokens = min(
                one.session.max_context_tokens, self._engine_tokens
            )
        self._routing.connect_engine(engine_id, engine, incarnation)

    def reconnect_engine(self, engine_id: str, engine: RequestEngine) -> None:
        """Its connection broke and was made again; what ran on the old one is continued."""
        self._routing.reconnect_engine(engine_id, engine)

    def offered_idle(self, engine_id: str, incarnation: int, refs: Iterable[KVRef]) -> list[str]:
        """Prefixes that this life keeps of executions of which nothing runs there. Those whose
        sessions are here and go on elsewhere are handed over, and released, but for those that a
        call goes on from already; returns their references."""
        source = self._routing.seat_of(engine_id, incarnation)
        ours = [ref for ref in refs if self._is_of_use(ref)]
        if source is None:
            return []
        return [ref.ref for ref in ours if self._handoffs.hand_over_idle(ref, source)]

    def _is_of_use(self, ref: KVRef) -> bool:
        one = self._open.get(ref.execution)
        return one is not None and not any(call.goes_on_from(ref.ids) for call in one.running)

    async def let_go(self) -> None:
        """Release every prefix that is kept for us, while the engines can still be asked."""
        await self._handoffs.settle()

    def close_door(self, engine_id: str) -> None:
        """New requests and continuations wait; what runs there goes on until it is frozen."""
        self._routing.close_door(engine_id)

    def open_door(self, engine_id: str) -> None:
        self._routing.open_door(engine_id)

    def engine_lost(self, engine_id: str) -> None:
        """What runs there is continued on the route's next open engine."""
        self._routing.engine_lost(engine_id)

    def set_routes(self, routes: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        """Execution to engine; executions that are not named keep theirs."""
        self._routing.set_routes(routes)

    def held(self) -> dict[str, int]:
        """Requests held now, by execution."""
        return self._routing.held()

    def num_running(self, execution: str) -> int:
        """Its requests under way, held ones too."""
        one = self._open.get(execution)
        return 0 if one is None else len(one.running)

    # ---- one call

    async def _is_allowed(self, execution: str, keys: list[str]) -> bool:
        if execution not in self._open:
            await self._events.on_unknown(execution, keys)
        one = self._open.get(execution)
        known = (one.key if one else _NO_KEY).encode()
        is_same = [hmac.compare_digest(key.encode(), known) for key in keys]
        return one is not None and any(is_same)

    async def _complete(self, asked: Asked) -> None:
        one, exchange = await self._admitted(asked)
        one.running[exchange] = None
        try:
            await exchange.run()
        finally:
            one.running.pop(exchange, None)
            one.idle.set()

    async def _admitted(self, asked: Asked) -> tuple[_Open, Exchange]:
        async with self._room_for(asked):
            incoming = await self._read(asked)
            await self._settle_left(asked)
            session = self._session_of(asked).session
            place = await self._off_loop(incoming.body, lambda: session.place(incoming))
            self._settle_retried(asked, place.call_key)
        await self._records.wait_room()
        one = self._session_of(asked)
        if len(one.running) >= MAX_RUNNING_PER_SESSION:
            raise Refusal("too many requests at once", kind=RefusalKind.TOO_MANY)
        attempt = one.session.admit(incoming, place)
        form = asked.dialect.form(
            incoming.raw, incoming.request, name=attempt.name, created_s=int(time.time())
        )
        return one, self._exchange(one, attempt, asked.connection, form)

    async def _count_tokens(self, asked: Asked) -> int:
        async with self._room_for(asked):
            incoming = await self._read(asked)
            session = self._session_of(asked).session
            place = await self._off_loop(incoming.body, lambda: session.place(incoming))
            return len(place.prompt_ids)

    @asynccontextmanager
    async def _room_for(self, asked: Asked) -> AsyncIterator[None]:
        """Short bodies need none. One session gets no more than its part."""
        num_bytes = asked.connection.num_body_bytes
        if num_bytes <= _LONG_BODY_BYTES:
            yield
            return
        try:
            async with (
                self._session_of(asked).room.hold(num_bytes, limit_s=ROOM_TIMEOUT_S),
                self._room.hold(num_bytes, limit_s=ROOM_TIMEOUT_S),
            ):
                yield
        except NoRoom as error:
            what = "too many long bodies at once"
            raise Refusal(what, kind=RefusalKind.UNAVAILABLE) from error

    async def _off_loop(self, body: bytes, work: Callable[[], _T]) -> _T:
        """What takes long with a long body must not keep the others waiting."""
        if len(body) < _OFF_LOOP_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _session_of(self, asked: Asked) -> _Open:
        one = self._open.get(asked.execution)
        if one is None:
            raise Refusal("this execution is over", kind=RefusalKind.UNAUTHORIZED)
        return one

    async def _read(self, asked: Asked) -> Incoming:
        body = await asked.connection.read_body()
        return await self._off_loop(body, lambda: self._parsed(asked, body))

    def _parsed(self, asked: Asked, body: bytes) -> Incoming:
        raw = bodies.decode_object(body)
        request = asked.dialect.parse(raw)
        evidence = Evidence(header=asked.connection.header, body=raw, request=request)
        return Incoming(
            request=request,
            raw=raw,
            body=body,
            protocol=asked.dialect.name,
            role=role_of(evidence, self._settings.labels),
        )

    async def _settle_left(self, asked: Asked) -> None:
        """A call may overtake the news that the client left an earlier one, of which it has kept
        a part."""
        if not (running := self._session_of(asked).running):
            return
        await asyncio.sleep(0)
        for exchange in running:
            exchange.yield_if_left()

    def _settle_retried(self, asked: Asked, call_key: bytes) -> None:
        """What the same call is a later try of is given up."""
        if asked.connection.is_gone:
            raise ClientLeft
        for exchange in self._session_of(asked).running:
            if exchange.is_same_call(call_key):
                exchange.yield_to_retry(_num_retries(asked.connection))

    def _exchange(
        self, one: _Open, attempt: Attempt, connection: Connection, form: AnswerForm
    ) -> Exchange:
        generation = Generation(
            GenerationPlan(
                turn=attempt.turn,
                attempt=attempt.attempt,
                request=self._generate_request(one, attempt),
                num_ids=self._renderer.num_ids,
                hold_max_s=self._settings.hold_max_s,
            ),
            routing=self._routing,
            handoffs=self._handoffs,
            on_continued=self._events.on_continued,
        )
        parts = ExchangeParts(
            session=one.session,
            attempt=attempt,
            num_retries=_num_retries(connection),
            form=form,
            generation=generation,
            parser=one.session.parser(attempt),
            connection=connection,
            keep=self._records.append,
            now_s=self._now_s,
            token_bytes=self._renderer.token_bytes,
            hold_comment_s=self._settings.hold_comment_s,
            watched=self._settings.watched,
        )
        return Exchange(parts)

    def _generate_request(self, one: _Open, attempt: Attempt) -> GenerateRequest:
        sampling, defaults = attempt.incoming.request.sampling, self._settings.defaults
        room = one.session.max_context_tokens - len(attempt.place.prompt_ids)
        wanted = sampling.max_new_tokens or defaults.max_new_tokens or room
        return GenerateRequest(
            request_id=attempt.name,
            execution=one.session.execution,
            prompt_ids=attempt.place.prompt_ids,
            max_new_tokens=min(wanted, room),
            temperature=_first(sampling.temperature, defaults.temperature),
            top_p=_first(sampling.top_p, defaults.top_p),
            top_k=max(0, int(_first(sampling.top_k, defaults.top_k))),
            min_p=_first(sampling.min_p, defaults.min_p),
            seed=turn_seed(one.seed, attempt.number, sampling),
            stop_ids=self._renderer.stop_ids,
        )


def _num_retries(connection: Connection) -> int:
    """What clients made of the vendors' libraries count of themselves."""
    told = connection.header("x-stainless-retry-count")
    return int(told) if told.isdecimal() and len(told) < 10 else 0


def turn_seed(execution_seed: int, turn: int, sampling: Sampling) -> int:
    """63 bits from the execution's seed and the turn's number. A seed that the client sends is
    mixed in, never taken alone: members of a group must stay different."""
    words = f"{execution_seed}/{turn}/{sampling.seed}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1


def _first(sent: float | None, default: float) -> float:
    return default if sent is None else sent
