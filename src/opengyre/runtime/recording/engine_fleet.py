"""Engines in other programs that come and go.

Owns: probing them, noticing that one died or is back. Must not know: HTTP towards clients, records,
which engine a session is best served by. Invariants: a session is routed to a connected engine
while there is one; a server that comes back is probed again before it serves; the loss of one moves
its sessions only.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.engines.http_engine import HttpEngine, ServerFacts, TokenWire
from opengyre.engines.http_stream import Origin
from opengyre.engines.probe import EngineKind, probe_engine
from opengyre.gateway.gateway import Gateway
from opengyre.runtime.recording.fleet_routes import FleetRoutes, Place
from opengyre.seams.errors import BoundaryError, ConfigError

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
_Probed = tuple[TokenWire, ServerFacts]


@dataclass(slots=True, kw_only=True)
class Member:
    """One server. `engine` while it is connected; `num_lives` counts its connections."""

    engine_id: str
    origin: Origin
    wire: TokenWire
    facts: ServerFacts
    engine: HttpEngine | None = None
    num_lives: int = 0

    def num_asked(self) -> int:
        return 0 if self.engine is None else self.engine.num_running

    def words(self) -> str:
        """What a person wants to know of it."""
        facts = self.facts
        return (
            f"{self.origin} ({self.wire.kind} {self.wire.path}, {facts.logprob_mode} logprobs, "
            f"context {facts.context_tokens})"
        )


class EngineFleet:
    """`open` probes all; `run` keeps them connected until it is cancelled."""

    def __init__(self, members: Sequence[Member], *, kind: EngineKind, context: int | None) -> None:
        self.members = list(members)
        self._kind = kind
        self._context_tokens = context
        self._places = {
            one.engine_id: Place(engine_id=one.engine_id, num_asked=one.num_asked)
            for one in self.members
        }
        self._routes = FleetRoutes(
            self._places.values(), now_s=lambda: asyncio.get_running_loop().time()
        )

    @property
    def context_tokens(self) -> int:
        """What every engine can take."""
        return min(one.facts.context_tokens for one in self.members)

    async def run(self, gateway: Gateway) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self.members:
                tasks.create_task(self._keep(member, gateway))

    def route(self, session: str) -> str:
        """The engine for a session that is about to make its first call."""
        return self._routes.route(session)

    async def _keep(self, member: Member, gateway: Gateway) -> None:
        """One server through all its lives."""
        while True:
            async with HttpEngine(member.origin, member.wire, member.facts) as engine:
                gateway.connect_engine(member.engine_id, engine, member.num_lives)
                member.num_lives += 1
                self._set_engine(member, engine, gateway)
                await _until_dead(engine)
                log.warning("%s (%s) is gone: %s", member.engine_id, member.origin, engine.trouble)
                self._set_engine(member, None, gateway)
                gateway.engine_lost(member.engine_id)
            member.wire, member.facts = await self._until_back(member)
            log.warning("%s (%s) is back", member.engine_id, member.origin)

    async def _until_back(self, member: Member) -> _Probed:
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                return await probe_engine(
                    member.origin, kind=self._kind, context_tokens=self._context_tokens
                )
            except BoundaryError:
                continue
            except ConfigError as error:
                log.warning("%s came back as something else: %s", member.engine_id, error)

    def _set_engine(self, member: Member, engine: HttpEngine | None, gateway: Gateway) -> None:
        """Sessions of engines that are gone go to those that are there."""
        member.engine = engine
        self._places[member.engine_id].is_connected = engine is not None
        gateway.set_routes(self._routes.move_orphans(gateway.num_running))


async def open_fleet(
    origins: Sequence[Origin], *, kind: EngineKind, context_tokens: int | None
) -> EngineFleet:
    """Probes every server. Raises ConfigError for one that is not there or gives no token ids."""
    probes = [probe_engine(one, kind=kind, context_tokens=context_tokens) for one in origins]
    try:
        async with asyncio.TaskGroup() as tasks:
            probing = [tasks.create_task(one) for one in probes]
    except* BoundaryError as group:
        raise ConfigError("\n".join(str(one) for one in group.exceptions)) from group
    members = [
        Member(engine_id=f"s{number}", origin=origin, wire=done.result()[0], facts=done.result()[1])
        for number, (origin, done) in enumerate(zip(origins, probing, strict=True))
    ]
    return EngineFleet(members, kind=kind, context=context_tokens)


async def _until_dead(engine: HttpEngine) -> None:
    """A failed request may be its own fault, or a connection's: only a server that does not
    answer is dead."""
    while True:
        await engine.troubled.wait()
        if not await engine.is_alive():
            return
        await asyncio.sleep(LOOK_AGAIN_S)
