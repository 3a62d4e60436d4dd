"""Which gateway serves whom: sessions, routes, engine links and doors as they should be.

Must not know: what executions do, why a door moves, how a gateway is started. Invariants: an
execution is served by one gateway from the opening of its session to its close; a call about doors,
routes or links is done when no living gateway is without it (one that is down learns it when it is
back), so nobody but the opening or closing of a session waits for a gateway that died.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from opengyre.runtime import messages as m
from opengyre.runtime.book import Book
from opengyre.runtime.gateway_lives import GatewayLives, GatewayMember, GatewayPlaces
from opengyre.runtime.processes import Processes
from opengyre.seams.errors import BoundaryError
from opengyre.seams.records import TurnRecord
from opengyre.store.observations import AnyObservation

log = logging.getLogger(__name__)

CLOSE_ANSWER_S = 90.0
LINK_RETRY_S = 1.0
LINK_PATIENCE_S = 60.0


@dataclass(slots=True, kw_only=True)
class _Link:
    """An engine as it was announced, and its door as it should be."""

    connect: m.ConnectEngine
    is_open: bool = False


class Gateways:
    """Start and close them by `lives`; then engines may be connected and sessions opened."""

    def __init__(
        self,
        places: GatewayPlaces,
        *,
        processes: Processes,
        book: Book,
        observe: Callable[[AnyObservation], None],
    ) -> None:
        self._processes = processes
        self._links: dict[str, _Link] = {}
        self._home: dict[str, GatewayMember] = {}
        self.lives = GatewayLives(
            places, processes=processes, book=book, observe=observe, on_back=self._bring_back
        )

    # ---- engines and routes

    async def connect_engine(self, message: m.ConnectEngine) -> None:
        """A new life of an engine, its door shut. Raises BoundaryError if it is not reached."""
        self._links[message.engine] = _Link(connect=message)
        await self._ask_all(message)

    async def forget_engine(self, engine: str) -> None:
        """It is gone; what ran there is continued elsewhere."""
        self._links.pop(engine, None)
        await self._ask_all(m.EngineGone(engine=engine))

    async def shut_door(self, engine: str) -> None:
        """From the return on no gateway gives this engine anything new."""
        if engine in self._links:
            self._links[engine].is_open = False
        await self._ask_all(m.ShutDoor(engine=engine))

    async def open_door(self, engine: str) -> None:
        if engine in self._links:
            self._links[engine].is_open = True
        await self._ask_all(m.OpenDoorAt(engine=engine))

    async def set_routes(self, moves: Iterable[tuple[str, str]]) -> None:
        """(execution, engine) pairs; those without a session are left out."""
        routes: dict[GatewayMember, list[tuple[str, str]]] = {}
        for execution, engine in moves:
            if (one := self._home.get(execution)) is not None:
                opening = one.sessions[execution]
                one.sessions[execution] = msgspec.structs.replace(opening, engine=engine)
                routes.setdefault(one, []).append((execution, engine))
        await self.lives.ask_each({one: m.SetRoutes(routes=told) for one, told in routes.items()})

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
            await self.lives.ask(one, opening)
        except BaseException:
            self._forget(opening.execution)
            raise
        return one.url

    async def close_session(self, execution: str) -> None:
        """Every durable turn of it was told when this returns, by this life or the next one."""
        one = self._home.get(execution)
        if one is None:
            return
        message = m.CloseSession(execution=execution)
        try:
            while await self.lives.ask(one, message, within_s=CLOSE_ANSWER_S) is None:
                await one.until_up()
        finally:
            self._forget(execution)

    def heard(self, name: str, turn: TurnRecord) -> None:
        """A turn was told; turns are told in the order in which they were written."""
        one = self.lives.members[name]
        one.told = turn.ref
        if not one.is_up.is_set():
            one.retold.append((turn.turn, turn.attempt))

    def _forget(self, execution: str) -> None:
        del self._home.pop(execution).sessions[execution]

    async def _least_loaded(self) -> GatewayMember:
        every = tuple(self.lives.members.values())
        while not (living := [one for one in every if one.is_up.is_set()]):
            await every[0].until_up()
        return min(living, key=lambda one: len(one.sessions))

    # ---- a gateway that is back

    async def _bring_back(self, one: GatewayMember) -> None:
        """Routes that changed meanwhile come first, then links, then open doors."""
        routes = [(execution, told.engine) for execution, told in one.sessions.items()]
        async with asyncio.TaskGroup() as calls:
            calls.create_task(self.lives.ask(one, m.SetRoutes(routes=routes)))
            for link in self._links.values():
                calls.create_task(self._connect(one, link))

    async def _connect(self, one: GatewayMember, link: _Link) -> None:
        """As long as both live; an engine that this gateway cannot reach in time is fenced."""
        engine, life = link.connect.engine, one.life
        deadline_s = _now_s() + LINK_PATIENCE_S
        while one.life == life and one.is_up.is_set() and self._links.get(engine) is link:
            try:
                await self.lives.ask(one, link.connect)
                if link.is_open:
                    await self.lives.ask(one, m.OpenDoorAt(engine=engine))
                return
            except BoundaryError as error:
                log.warning("%s does not reach %s: %s", one.name, engine, error)
            if _now_s() > deadline_s:
                return self._processes.fence(engine, link.connect.incarnation)
            await asyncio.sleep(LINK_RETRY_S)

    async def _ask_all(self, message: m.Message) -> None:
        await self.lives.ask_each(dict.fromkeys(self.lives.members.values(), message))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
