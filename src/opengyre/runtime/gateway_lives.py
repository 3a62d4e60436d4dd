"""The lives of the gateway processes: one after another at the same address, within bounds.

Owns: starting them, noticing that one is down, starting it again with the sessions it had, calls to
those that are up. Must not know: engines, doors, routes. Invariants: the sockets live here, so a
client that calls while a gateway is down waits in the kernel; a life begins only after the last one
is gone, and is served no client before its sessions are whole; time without a gateway is held time.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
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
READY_WITHIN_S = 300.0
END_WITHIN_S = 1.0
BACK_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlaces:
    """What the processes start with; the k-th listens at `port` + k, with 0 at a free one."""

    config_json: str
    tokens_dir: Path
    host: str
    port: int
    num_processes: int


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayMember:
    """One gateway over all its lives. `life` counts from 1, `begun` is the last one that was ready;
    `told` is where the turn lies that was told last, `retold` are those told while it was down."""

    name: str
    sock: socket.socket
    life: int = 0
    begun: int = 0
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    down_since_s: float = 0.0
    deaths_s: list[float] = field(default_factory=list)
    told: SegmentRef | None = None
    retold: list[tuple[str, int]] = field(default_factory=list)
    sessions: dict[str, m.OpenSession] = field(default_factory=dict)

    @property
    def url(self) -> str:
        host, port = self.sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def until_up(self) -> None:
        """Raises BoundaryError if it is not back in time."""
        try:
            async with asyncio.timeout(BACK_WITHIN_S):
                await self.is_up.wait()
        except TimeoutError as error:
            what = f"not back in {BACK_WITHIN_S:g} s"
            raise BoundaryError(self.name, what, retryable=False) from error


class GatewayLives:
    """`on_back(member)` runs in each life but the first, once its sessions are whole."""

    def __init__(
        self,
        places: GatewayPlaces,
        *,
        processes: Processes,
        book: Book,
        observe: Callable[[AnyObservation], None],
        on_back: Callable[[GatewayMember], Awaitable[None]],
    ) -> None:
        self._places = places
        self._processes = processes
        self._book = book
        self._observe = observe
        self._on_back = on_back
        self.members: dict[str, GatewayMember] = {}

    async def start(self) -> None:
        """All at once. Raises BoundaryError, ConfigError where the user's input is at fault."""
        places = self._places
        for k in range(places.num_processes):
            sock = bind(places.host, places.port and places.port + k)
            self.members[f"gateway{k}"] = GatewayMember(name=f"gateway{k}", sock=sock)
        async with asyncio.TaskGroup() as starts:
            for one in self.members.values():
                starts.create_task(self._begin(one))

    def close(self) -> None:
        """When no gateway lives any more."""
        for one in self.members.values():
            one.sock.close()

    def died(self, name: str, incarnation: int, reason: str, tasks: asyncio.TaskGroup) -> None:
        """Start it again. A life that was never ready is the case of who starts it."""
        one = self.members[name]
        if one.begun == incarnation:
            self._go_down(one)
            for execution in one.sessions:
                self._book.executions[execution].held.set(HeldBy.REQUEST, False, _now_s())
            tasks.create_task(self._revive(one, reason))

    def waits(self) -> tuple[str, ...]:
        """Who waits for a gateway that is on its way back, in words."""
        return tuple(
            f"{len(one.sessions)} executions wait for {one.name}, which is down for "
            f"{_now_s() - one.down_since_s:.0f} s"
            for one in self.members.values()
            if one.begun and not one.is_up.is_set()
        )

    # ---- calls

    async def ask_each(self, messages: Mapping[GatewayMember, m.Message]) -> None:
        """All at once, each frame on its way before anything else is. Raises the first refusal."""
        if len(messages) == 1:  # on its way even before this task waits
            await self.ask(*next(iter(messages.items())))
            return
        async with asyncio.TaskGroup() as asks:
            tasks = [asks.create_task(self._refusal(*pair)) for pair in messages.items()]
        refusals = [error for task in tasks if (error := task.result()) is not None]
        if refusals:
            raise refusals[0]

    async def ask(
        self, one: GatewayMember, message: m.Message, *, within_s: float = ANSWER_S
    ) -> Any:
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

    async def _refusal(self, one: GatewayMember, message: m.Message) -> BoundaryError | None:
        try:
            await self.ask(one, message)
        except BoundaryError as error:
            return error
        return None

    # ---- lives

    def _go_down(self, one: GatewayMember) -> None:
        """From now on its clients are held; if it is not gone soon it is ended."""
        if one.is_up.is_set():
            one.is_up.clear()
            one.down_since_s = _now_s()
            self._hold(one, is_held=True)
            fence = self._processes.fence
            asyncio.get_running_loop().call_later(END_WITHIN_S, fence, one.name, one.life)

    async def _revive(self, one: GatewayMember, reason: str) -> None:
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
            await self._begin_next(one, reason)
        except BoundaryError:
            self._observe(lost)
            if self._processes.is_ending:
                return
            raise
        gone_s, retold = _now_s() - one.down_since_s, one.retold
        self._observe(msgspec.structs.replace(lost, gone_s=gone_s, retold=retold))
        one.retold = []
        self._hold(one, is_held=False)
        await self._on_back(one)

    async def _begin_next(self, one: GatewayMember, reason: str) -> None:
        """Tries again if that dies at once, as often as a gateway may die."""
        while not one.is_up.is_set():
            _count_death(one, reason)
            if self._processes.is_ending:
                raise BoundaryError(one.name, "not needed any more", retryable=False)
            try:
                await self._begin(one)
            except (BoundaryError, ConfigError) as error:
                self._processes.kill(one.name)
                reason = str(error)

    async def _begin(self, one: GatewayMember) -> None:
        one.life += 1
        await self._processes.start(
            one.name,
            incarnation=one.life,
            module=MODULE,
            setup=self._setup(one),
            fds=(one.sock.fileno(),),
            within_s=READY_WITHIN_S,
        )
        if self._processes.incarnation(one.name) != one.life:
            raise BoundaryError(one.name, "it died as soon as it was ready", retryable=True)
        one.begun = one.life
        one.is_up.set()

    def _setup(self, one: GatewayMember) -> m.GatewaySetup:
        return m.GatewaySetup(
            config_json=self._places.config_json,
            tokens_dir=str(self._places.tokens_dir),
            listen_fd=one.sock.fileno(),
            sessions=[self._with_turns(opening) for opening in one.sessions.values()],
            told=one.told,
        )

    def _with_turns(self, opening: m.OpenSession) -> m.OpenSession:
        refs = [turn.ref for turn in self._book.executions[opening.execution].turns]
        return msgspec.structs.replace(opening, turns=refs)

    def _hold(self, one: GatewayMember, *, is_held: bool) -> None:
        """Held by the death of their gateway, from now on or no longer; either way, cut by it."""
        for execution in one.sessions:
            found = self._book.executions[execution]
            found.held.set(HeldBy.DEATH, is_held, _now_s())
            found.is_cut = True


def _count_death(one: GatewayMember, reason: str) -> None:
    """Raises BoundaryError after too many in a short time."""
    now_s = _now_s()
    recent = [at_s for at_s in one.deaths_s if now_s - at_s < DEATHS_WITHIN_S]
    one.deaths_s = [*recent, now_s]
    if len(recent) >= MAX_DEATHS:
        what = f"died {len(one.deaths_s)} times within {DEATHS_WITHIN_S:g} s; last: {reason}"
        raise BoundaryError(one.name, what, retryable=False)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
