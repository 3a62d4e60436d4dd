"""A gateway's process: wires the HTTP gateway, the recorder and the engine links together.

Must not know: roles, steps, groups, other gateways. Invariants: a turn is told to the controller
only after its bytes are synced; a newly connected engine's door is shut until the controller opens
it; sessions of an earlier life are whole, and all their turns told, before anyone is served; one
that lost its controller ends at once, since the next life may go on with its sessions as they are,
and with none that were closed.
"""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from opengyre.config.harness_profile import load_profile
from opengyre.config.load import parse_resolved
from opengyre.config.root import RunConfig
from opengyre.gateway.call_counts import watched_regex
from opengyre.gateway.continuation import Continued
from opengyre.gateway.gateway import Gateway, GatewayEvents, GatewaySettings, SamplingDefaults
from opengyre.gateway.handoffs import Handoff
from opengyre.gateway.protocol import raise_file_limit
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.restoring import Earlier
from opengyre.runtime import messages as m
from opengyre.runtime.child import Child, run_child
from opengyre.runtime.durable import recover
from opengyre.runtime.label_rules import label_rules
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef
from opengyre.seams.records import TurnRecord
from opengyre.store.segments import SegmentWriter
from opengyre.transport.engine_link import RemoteEngine

log = logging.getLogger(__name__)

RECONNECT_S = 1.0
MAX_RECONNECTS = 10
CONNECT_TIMEOUT_S = 20.0


class GatewayProcess:
    """Handles what the controller asks, and keeps the links to its engines."""

    def __init__(self, gateway: Gateway, child: Child, tasks: asyncio.TaskGroup) -> None:
        self._gateway = gateway
        self._child = child
        self._tasks = tasks
        self._links: dict[str, RemoteEngine] = {}
        self._wanted: dict[str, m.ConnectEngine] = {}

    async def restore(self, setup: m.GatewaySetup) -> None:
        """Open the sessions that go on, and tell what no earlier life told of them."""
        found = await recover(setup)
        for opening in setup.sessions:
            records = found[opening.execution]
            self._open_session(
                opening,
                Earlier(
                    first_turn=opening.first_turn,
                    records=[*records.told, *records.untold],
                    num_undelivered=len(records.untold),
                ),
            )
            for record in records.untold:
                self._child.tell(m.TurnTold(turn=record.header))
            await self._child.flush()

    async def handle(self, message: Any) -> m.Message | None:
        try:
            return await self._handle(message)
        except (TimeoutError, ValueError) as error:
            raise BoundaryError("gateway", str(error) or "took too long", retryable=True) from error

    async def _handle(self, message: Any) -> m.Message | None:
        gateway = self._gateway
        match message:
            case m.OpenSession():
                self._open_session(message, Earlier(first_turn=message.first_turn))
            case m.CloseSession():
                counts = await gateway.close_session(message.execution)
                return m.SessionClosed(num_turns=counts.num_turns)
            case m.ConnectEngine():
                await self._connect(message)
            case m.EngineGone():
                self._wanted.pop(message.engine, None)
                await self._disconnect(message.engine)
            case m.ShutDoor():
                gateway.close_door(message.engine)
            case m.OpenDoorAt():
                gateway.open_door(message.engine)
            case m.SetRoutes():
                gateway.set_routes(message.routes)
            case _:
                what = f"does not take {type(message).__name__}"
                raise BoundaryError("gateway", what, retryable=False)
        return m.Done()

    async def close(self) -> None:
        for engine in list(self._links):
            await self._disconnect(engine)

    def _open_session(self, message: m.OpenSession, earlier: Earlier) -> None:
        problems = self._gateway.open_session(
            message.execution, message.key, message.engine, seed=message.seed, earlier=earlier
        )
        for problem in problems:
            log.warning("not restored: %s", problem)

    async def _connect(self, message: m.ConnectEngine) -> None:
        """Of several at once for one engine the last one stands."""
        self._wanted[message.engine] = message
        link = self._link(message)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await link.open()
            self._check_wanted(message)
            await self._disconnect(message.engine)
            self._check_wanted(message)
        except (BoundaryError, TimeoutError):
            await link.close()
            raise
        self._links[message.engine] = link
        self._gateway.connect_engine(message.engine, link, message.incarnation)
        self._gateway.close_door(message.engine)
        self._tasks.create_task(self._keep(link, message))

    def _link(self, message: m.ConnectEngine) -> RemoteEngine:
        def offered(refs: list[KVRef]) -> list[str]:
            return self._gateway.offered_idle(message.engine, message.incarnation, refs)

        return RemoteEngine(message.link_address, name=message.engine, on_prefixes=offered)

    def _check_wanted(self, message: m.ConnectEngine) -> None:
        if self._wanted.get(message.engine) is not message:
            raise BoundaryError(message.engine, "another link is wanted by now", retryable=True)

    async def _keep(self, link: RemoteEngine, message: m.ConnectEngine) -> None:
        """Until the controller disconnects the engine: make a broken connection again.

        The engine may have died, which the controller will tell, or only the connection.
        """
        while True:
            await link.lost.wait()
            for _ in range(MAX_RECONNECTS):
                if self._links.get(message.engine) is not link:
                    return
                if (made := await self._reconnect(link, message)) is not None:
                    link = made
                    break
                await asyncio.sleep(RECONNECT_S)
            else:
                lost = m.LinkLost(engine=message.engine, incarnation=message.incarnation)
                self._child.tell(lost)
                return

    async def _reconnect(self, old: RemoteEngine, message: m.ConnectEngine) -> RemoteEngine | None:
        link = self._link(message)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await link.open()
        except (BoundaryError, TimeoutError) as error:
            why = str(error) or f"no answer in {CONNECT_TIMEOUT_S:g} s"
            log.warning("%s: no new connection: %s", message.engine, why)
            await link.close()
            return None
        if self._links.get(message.engine) is not old:
            await link.close()
            return link
        self._links[message.engine] = link
        self._gateway.reconnect_engine(message.engine, link)
        await old.close()
        return link

    async def _disconnect(self, engine: str) -> None:
        link = self._links.pop(engine, None)
        if link is not None:
            self._gateway.engine_lost(engine)
            await link.close()


class ToController:
    """What the gateway tells, as messages."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def events(self) -> GatewayEvents:
        return GatewayEvents(
            on_turn=self._tell_turn,
            on_hold=self._tell_hold,
            on_continued=self._tell_continued,
            on_handoff=self._tell_handoff,
        )

    def _tell_turn(self, turn: TurnRecord) -> None:
        self._child.tell(m.TurnTold(turn=turn))

    def _tell_hold(self, execution: str, is_held: bool) -> None:
        self._child.tell(m.HoldTold(execution=execution, is_held=is_held))

    def _tell_handoff(self, told: Handoff) -> None:
        self._child.tell(m.HandoffTold(**asdict(told)))

    def _tell_continued(self, told: Continued) -> None:
        self._child.tell(
            m.ContinuedTold(
                execution=told.execution,
                turn=told.turn,
                attempt=told.attempt,
                from_engine=told.from_engine,
                to_engine=told.to_engine,
                reason=told.reason,
                num_tokens_so_far=told.num_tokens_so_far,
            )
        )


def gateway_settings(config: RunConfig) -> GatewaySettings:
    sampling = config.sampling
    return GatewaySettings(
        max_context_tokens=sampling.context_tokens,
        host=config.gateway.host,
        port=config.gateway.port,
        hold_comment_s=config.gateway.hold_comment_s,
        hold_max_s=config.schedule.hold_max_s,
        defaults=SamplingDefaults(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_new_tokens=sampling.max_new_tokens,
        ),
        labels=label_rules(load_profile(config.harness.profile)),
        watched=watched_regex(config.reward.watched_pattern),
    )


def listening_socket(setup: m.GatewaySetup) -> socket.socket:
    """The controller's, which is still there, connections waiting in it, when we are gone."""
    return socket.socket(fileno=os.dup(setup.listen_fd))


def build_gateway(setup: m.GatewaySetup, events: GatewayEvents) -> tuple[Gateway, SegmentWriter]:
    """The gateway of the config, and where it writes. Raises ConfigError."""
    config = parse_resolved(setup.config_json)
    recorder = SegmentWriter(Path(setup.tokens_dir))
    gateway = Gateway(
        replace(gateway_settings(config), sock=listening_socket(setup)),
        renderer=load_renderer(
            Path(config.model.path), allow_rerender=config.gateway.allow_rerender
        ),
        recorder=recorder,
        events=events,
    )
    return gateway, recorder


BuildGateway = Callable[[m.GatewaySetup, GatewayEvents], tuple[Gateway, SegmentWriter]]


async def main(address: str, child: Child, *, build: BuildGateway = build_gateway) -> None:
    async with asyncio.TaskGroup() as tasks:
        setup = await child.connect(address, tasks)
        if not isinstance(setup, m.GatewaySetup):
            raise BoundaryError("gateway", "expected a gateway's setup", retryable=False)
        gateway, recorder = build(setup, ToController(child).events())
        process = GatewayProcess(gateway, child, tasks)
        await process.restore(setup)
        async with gateway:
            child.serve_with(process.handle)
            child.tell(m.GatewayReady(host=gateway.host, port=gateway.port))
            await child.quit.wait()
            if child.is_orphan:
                await child.die()
            await gateway.let_go()
            await process.close()
        await recorder.close()
        child.hang_up()


if __name__ == "__main__":
    gc.freeze()  # the modules stay: later collections need not go over them, in mid-stream
    raise_file_limit()
    run_child(main)
