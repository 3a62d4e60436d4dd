"""The gateway processes of a run: which of them serves whom, and the way back from a death.

Owns: sessions, routes, links and doors as they should be; a life that begins learns them all.
Must not know: what executions do, why a door moves. Invariants: an execution is served by one
gateway from the opening of its session to its close; a call about doors, routes or links is done
when no living gateway is without it (one that is down learns it when it is back), so nobody but
the opening or closing of a session waits for a restart; time without a gateway is held time.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opengyre.gateway.server import bind
from opengyre.runtime import messages as m
from opengyre.runtime.book import Book, HeldBy
from opengyre.runtime.processes import Processes
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.records import SegmentRef
from opengyre.store.observations import AnyObservation, GatewayLost

log = logging.getLogger(__name__)

MODULE = "opengyre.runtime.gateway_process"
MAX_DEATHS = 3
DEATHS_WITHIN_S = 300.0
ANSWER_S = 30.0
CLOSE_ANSWER_S = 90.0
BACK_WITHIN_S = 600.0
LINK_RETRY_S = 1.0
LINK_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlaces:
    """What the processes start with; the k-th listens at `port` + k, with 0 at a free one."""

    config_json: str
    tokens_dir: Path
    host: str
    port: int
    num_processes: int


@dataclass(slots=True, kw_only=True)
class _Link:
    """An engine as it was announced, and its door as it should be."""

    connect: m.ConnectEngine
    is_open: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Gateway:
    """`sock` is bound here, so that calls wait in its backlog from one life to the next; `life`
    counts from 1, `begun` is the last one that was ready; `told` is where the turn lies that was
    told last."""

    name: str
    sock: socket.socket
    life: int = 0
    begun: int = 0
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    down_since_s: float = 0.0
    deaths_s: list[float] = field(default_factory=list)
    told: SegmentRef | None = None
    sessions: dict[str, m.OpenSession] = field(default_factory=dict)

    @property
    def url(self) -> str:
        host, port = self.sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Gateways:
    """`start` them; `died` is told of each death of one."""

    def __init__(
        self,
        places: GatewayPlaces,
        *,
        processes: Processes,
        book: Book,
        observe: Callable[[AnyObservation], None],
    ) -> None:
        self._places = places
        self._processes = processes
        self._book = book
        self._observe = observe
        self._links: dict[str, _Link] = {}
        self._home: dict[str, _Gateway] = {}
        self._gateways: dict[str, _Gateway] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._gateways)

    def waits(self) -> tuple[str, ...]:
        """Who waits for a gateway that is on its way back, in words."""
        return tuple(
            f"{len(one.sessions)} executions wait for {one.name}, which is down for "
            f"{_now_s() - one.down_since_s:.0f} s"
            for one in self._gateways.values()
            if one.begun and not one.is_up.is_set()
        )

    async def start(self) -> None:
        """All at once. Raises BoundaryError, ConfigError where the user's input is at fault."""
        places = self._places
        for k in range(places.num_processes):
            sock = bind(places.host, places.port and places.port + k)
            self._gateways[f"gateway{k}"] = _Gateway(name=f"gateway{k}", sock=sock)
        async with asyncio.TaskGroup() as starts:
            for one in self._gateways.values():
                starts.create_task(self._begin_life(one))

    def close(self) -> None:
        """When no gateway lives any more."""
        for one in self._gateways.values():
            one.sock.close()

    # ---- engines and routes

    async def connect_engine(self, message: m.ConnectEngine) -> None:
        """A new life of an engine, its door shut. Raises BoundaryError if it is not reached."""
        self._links[message.engine] = _Link(connect=message)
        await self._ask_each(dict.fromkeys(self._gateways.values(), message))

    async def forget_engine(self, engine: str) -> None:
        """It is gone; what ran there is continued elsewhere."""
        self._links.pop(engine, None)
        await self._ask_each(dict.fromkeys(self._gateways.values(), m.EngineGone(engine=engine)))

    async def shut_door(self, engine: str) -> None:
        """From the return on no gateway gives this engine anything new."""
        if engine in self._links:
            self._links[engine].is_open = False
        await self._ask_each(dict.fromkeys(self._gateways.values(), m.ShutDoor(engine=engine)))

    async def open_door(self, engine: str) -> None:
        if engine in self._links:
            self._links[engine].is_open = True
        await self._ask_each(dict.fromkeys(self._gateways.values(), m.OpenDoorAt(engine=engine)))

    async def set_routes(self, moves: Iterable[tuple[str, str]]) -> None:
        """(execution, engine) pairs; those without a session are left out."""
        routes: dict[_Gateway, list[tuple[str, str]]] = {}
        for execution, engine in moves:
            if (one := self._home.get(execution)) is not None:
                opening = one.sessions[execution]
                one.sessions[execution] = msgspec.structs.replace(opening, engine=engine)
                routes.setdefault(one, []).append((execution, engine))
        await self._ask_each({one: m.SetRoutes(routes=told) for one, told in routes.items()})

    # ---- sessions

    async def open_session(self, make: Callable[[], m.OpenSession]) -> str:
        """The URL of the gateway that serves it: of the living ones that with fewest sessions.

        `make` is called right before the session is sent: routes may change until then.
        """
        one = await self._least_loaded()
        opening = make()
        one.sessions[opening.execution] = opening
        self._home[opening.execution] = one
        try:
            await self._ask(one, opening)
        except BaseException:
            self._forget(opening.execution)
            raise
        return one.url

    async def close_session(self, execution: str) -> None:
        """Every durable turn of it was told when this returns, by this life or the next one."""
        one = self._home.get(execution)
        if one is None:
            return
        try:
            message = m.CloseSession(execution=execution)
            while await self._ask(one, message, within_s=CLOSE_ANSWER_S) is None:
                await _until_up(one)
        finally:
            self._forget(execution)

    def _forget(self, execution: str) -> None:
        del self._home.pop(execution).sessions[execution]

    async def _least_loaded(self) -> _Gateway:
        every = tuple(self._gateways.values())
        while not (living := [one for one in every if one.is_up.is_set()]):
            await _until_up(every[0])
        return min(living, key=lambda one: len(one.sessions))

    # ---- lives

    def heard(self, name: str, ref: SegmentRef) -> None:
        """A turn was told; turns are told in the order in which they were written."""
        self._gateways[name].told = ref

    def died(self, name: str, incarnation: int, reason: str, tasks: asyncio.TaskGroup) -> None:
        """Start it again. A life that was never ready is the case of who starts it."""
        one = self._gateways[name]
        if one.begun == incarnation:
            self._go_down(one)
            for execution in one.sessions:
                self._book.executions[execution].held.set(HeldBy.REQUEST, False, _now_s())
            tasks.create_task(self._revive(one, reason))

    async def _revive(self, one: _Gateway, reason: str) -> None:
        """A new life with everything the last one had, unless the run is ending.

        Raises BoundaryError after too many deaths.
        """
        lost = GatewayLost(
            gateway=one.name,
            incarnation=one.begun,
            reason=reason,
            executions=list(one.sessions),
            gone_s=None,
        )
        try:
            await self._begin_next_life(one, reason)
        except BoundaryError:
            self._observe(lost)
            if self._processes.is_ending:
                return
            raise
        gone_s = _now_s() - one.down_since_s
        self._observe(msgspec.structs.replace(lost, gone_s=gone_s))
        self._hold_all(one, is_held=False)
        routes = [(execution, told.engine) for execution, told in one.sessions.items()]
        async with asyncio.TaskGroup() as links:
            links.create_task(self._ask(one, m.SetRoutes(routes=routes)))
            for link in self._links.values():
                links.create_task(self._connect(one, link))

    async def _begin_next_life(self, one: _Gateway, reason: str) -> None:
        """Tries again if that dies at once, as often as a gateway may die."""
        while not one.is_up.is_set():
            _count_death(one, reason)
            if self._processes.is_ending:
                raise BoundaryError(one.name, "not needed any more", retryable=False)
            try:
                await self._begin_life(one)
            except (BoundaryError, ConfigError) as error:
                self._processes.kill(one.name)
                reason = str(error)

    async def _begin_life(self, one: _Gateway) -> None:
        one.life += 1
        await self._processes.start(
            one.name,
            incarnation=one.life,
            module=MODULE,
            setup=self._setup(one),
            fds=(one.sock.fileno(),),
        )
        if self._processes.incarnation(one.name) != one.life:
            raise BoundaryError(one.name, "it died as soon as it was ready", retryable=True)
        one.begun = one.life
        one.is_up.set()

    def _setup(self, one: _Gateway) -> m.GatewaySetup:
        """The oldest file of interest holds the first turn of a living session, or may hold the
        first one that was not told."""
        turns = [self._book.executions[execution].turns[:1] for execution in one.sessions]
        segments = [turn.ref.segment for first in turns for turn in first]
        segments += [] if one.told is None else [one.told.segment]
        return m.GatewaySetup(
            config_json=self._places.config_json,
            tokens_dir=str(self._places.tokens_dir),
            listen_fd=one.sock.fileno(),
            sessions=list(one.sessions.values()),
            first_segment=min(segments, default=0),
            told=one.told,
        )

    async def _connect(self, one: _Gateway, link: _Link) -> None:
        """As long as both live; an engine that this gateway cannot reach in time is fenced."""
        engine, life = link.connect.engine, one.life
        deadline_s = _now_s() + LINK_PATIENCE_S
        while one.life == life and one.is_up.is_set() and self._links.get(engine) is link:
            try:
                await self._ask(one, link.connect)
                if link.is_open:
                    await self._ask(one, m.OpenDoorAt(engine=engine))
                return
            except BoundaryError as error:
                log.warning("%s does not reach %s: %s", one.name, engine, error)
            if _now_s() > deadline_s:
                return self._processes.fence(engine, link.connect.incarnation)
            await asyncio.sleep(LINK_RETRY_S)

    def _go_down(self, one: _Gateway) -> None:
        """From now on its clients are held; what is left of it is ended."""
        if not one.is_up.is_set():
            return
        one.is_up.clear()
        one.down_since_s = _now_s()
        self._hold_all(one, is_held=True)
        self._processes.fence(one.name, one.life)

    def _hold_all(self, one: _Gateway, *, is_held: bool) -> None:
        """Held by the death of their gateway, from now on or no longer; either way, cut by it."""
        for execution in one.sessions:
            found = self._book.executions[execution]
            found.held.set(HeldBy.DEATH, is_held, _now_s())
            found.is_cut = True

    # ---- calls

    async def _ask_each(self, messages: Mapping[_Gateway, m.Message]) -> None:
        """All at once, each frame on its way before anything else is. Raises the first refusal."""
        async with asyncio.TaskGroup() as asks:
            tasks = [asks.create_task(self._refusal(*pair)) for pair in messages.items()]
        refusals = [error for task in tasks if (error := task.result()) is not None]
        if refusals:
            raise refusals[0]

    async def _refusal(self, one: _Gateway, message: m.Message) -> BoundaryError | None:
        try:
            await self._ask(one, message)
        except BoundaryError as error:
            return error
        return None

    async def _ask(self, one: _Gateway, message: m.Message, *, within_s: float = ANSWER_S) -> Any:
        """Its answer; None if it is down, or died before it gave one, or gave none in time.

        Raises BoundaryError if a living one refuses.
        """
        life = one.life
        if not one.is_up.is_set():
            return None
        try:
            async with asyncio.timeout(within_s):
                return await self._processes.call(one.name, message, timeout_s=2 * within_s)
        except TimeoutError:
            log.warning("%s gave no answer in %g s and is ended", one.name, within_s)
        except BoundaryError:
            if one.life == life and self._processes.is_alive(one.name):
                raise
        if one.life == life:
            self._go_down(one)
        return None


def _count_death(one: _Gateway, reason: str) -> None:
    """Raises BoundaryError after too many in a short time."""
    now_s = _now_s()
    recent = [at_s for at_s in one.deaths_s if now_s - at_s < DEATHS_WITHIN_S]
    one.deaths_s = [*recent, now_s]
    if len(recent) >= MAX_DEATHS:
        what = f"died {len(one.deaths_s)} times within {DEATHS_WITHIN_S:g} s; last: {reason}"
        raise BoundaryError(one.name, what, retryable=False)


async def _until_up(one: _Gateway) -> None:
    """Raises BoundaryError if it is not back in time."""
    try:
        async with asyncio.timeout(BACK_WITHIN_S):
            await one.is_up.wait()
    except TimeoutError as error:
        what = f"not back in {BACK_WITHIN_S:g} s"
        raise BoundaryError(one.name, what, retryable=False) from error


def _now_s() -> float:
    return asyncio.get_running_loop().time()
