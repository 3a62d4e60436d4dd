"""The processes of a run as the controller sees them: start, greet, call, notice their death.

Owns: connections and incarnations. Must not know: what roles or steps are. Invariants: a name
has at most one living incarnation; a death is told once; calls to a dead one fail at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from opengyre.runtime.child import WIRE
from opengyre.runtime.launcher import LocalLauncher
from opengyre.runtime.messages import (
    CannotStart,
    CellReady,
    GatewayReady,
    GatewaySetup,
    Hello,
    Message,
    Quit,
)
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.transport.framed import Peer, serve

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
QUIT_TIMEOUT_S = 5.0

OnDeath = Callable[[str, int, str], None]
OnCrash = Callable[[BaseException], None]
Handler = Callable[[str, Any], Awaitable[Message | None]]


@dataclass(slots=True)
class Member:
    """One child process; `ready` holds the message it announced itself with."""

    name: str
    incarnation: int
    setup: Message
    pid: int = 0
    peer: Peer | None = None
    ready: asyncio.Future[Any] = field(default_factory=lambda: asyncio.Future())


class Processes:
    """Children by name; what a life that is over still says is dropped.

    `on_death(name, incarnation, reason)` is called once per incarnation.
    """

    def __init__(self, log_dir: Path, *, address: str) -> None:
        self._launcher = LocalLauncher(log_dir, self._exited)
        self._address = address
        self._handler: Handler | None = None
        self._on_death: OnDeath | None = None
        self._on_crash: OnCrash | None = None
        self._members: dict[str, Member] = {}
        self._server: asyncio.Server | None = None
        self._greeted: dict[asyncio.Task[None], Peer] = {}
        self.is_ending = False

    async def listen(self, handler: Handler, on_death: OnDeath, on_crash: OnCrash) -> None:
        """Take connections; `handler(name, message)` answers what children tell and ask.

        What a handler raises beside BoundaryError is our own fault and goes to `on_crash`.
        """
        self._handler, self._on_death, self._on_crash = handler, on_death, on_crash
        self._server, self._address = await serve(self._address, self._greet)

    async def start(
        self,
        name: str,
        *,
        incarnation: int,
        module: str,
        setup: Message,
        fds: tuple[int, ...] = (),
        within_s: float = START_TIMEOUT_S,
    ) -> Any:
        """Start a child, which inherits `fds`, and return its ready message.

        Raises BoundaryError if it does not come, ConfigError if the user's input is at fault.
        """
        member = Member(name=name, incarnation=incarnation, setup=setup)
        self._members[name] = member
        member.pid = await self._launcher.start(name, incarnation, module, self._address, fds=fds)
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(member.ready)
        except TimeoutError as error:
            what = f"{name} was not ready in {within_s:g} s; see its log"
            raise BoundaryError("process", what, retryable=False) from error

    def _refuse(self, message: CannotStart) -> None:
        """The user's input does not let a child start."""
        member = self._members.get(message.name)
        if member is not None and not member.ready.done():
            member.ready.set_exception(ConfigError(message.reason))
            member.ready.exception()  # several children say the same; one of them is heard

    def _announce(self, member: Member, message: Message) -> None:
        """A child said that it is ready."""
        if not member.ready.done():
            member.ready.set_result(message)

    def is_alive(self, name: str) -> bool:
        """Is it connected? One whose connection is gone is dead, or ends by itself."""
        member = self._members.get(name)
        return member is not None and member.peer is not None and not member.peer.closed.is_set()

    def incarnation(self, name: str) -> int:
        """Of the one that lives or starts now; 0 if there is none."""
        member = self._members.get(name)
        return 0 if member is None else member.incarnation

    def store_address(self, name: str) -> str:
        """Where `name` hosts a store, by what it announced; "" if it does not, or is not ready."""
        member = self._members.get(name)
        ready = None if member is None or not member.ready.done() else member.ready.result()
        return ready.store_address if isinstance(ready, CellReady) else ""

    def pid(self, name: str) -> int:
        return self._members[name].pid

    async def call(self, name: str, message: Message, *, timeout_s: float = 60.0) -> Any:
        """Ask a child. Raises BoundaryError on refusal, death or time-out."""
        member = self._members.get(name)
        if member is None or member.peer is None:
            raise BoundaryError(name, "the process is not there", retryable=True)
        return await member.peer.call(message, timeout_s=timeout_s)

    def kill(self, name: str) -> None:
        """Fence a child that does not answer: it is dead from now on."""
        member = self._members.get(name)
        if member is not None:
            self._launcher.kill(name, member.incarnation)

    def fence(self, name: str, incarnation: int) -> None:
        """`kill`, if it is still this life."""
        self._launcher.kill(name, incarnation)

    def _exited(self, name: str, incarnation: int, returncode: int) -> None:
        """The launcher's exit notice."""
        member = self._members.get(name)
        if member is None or member.incarnation != incarnation:
            return
        del self._members[name]
        reason = f"{name} ended with code {returncode}"
        if not member.ready.done():
            member.ready.set_exception(BoundaryError("process", reason, retryable=False))
            member.ready.exception()
        if not self.is_ending and self._on_death is not None:
            log.warning("%s", reason)
            self._on_death(name, incarnation, reason)

    async def quit_all(self) -> None:
        """Tell every child to finish, the gateways first; then wait for them to be gone."""
        self.is_ending = True
        members = self._members.values()
        for member in sorted(members, key=lambda one: not isinstance(one.setup, GatewaySetup)):
            if member.peer is None:
                continue
            try:
                await member.peer.call(Quit(), timeout_s=QUIT_TIMEOUT_S)
            except BoundaryError as error:
                log.warning("%s did not take its leave: %s", member.name, error)
        await self._launcher.end_all(QUIT_TIMEOUT_S)
        if self._server is not None:
            self._server.close()
        await self._hang_up()

    async def _hang_up(self) -> None:
        """No connection outlives the run, also if the end of its child is still to be read."""
        left = set(self._greeted)
        for peer in self._greeted.values():
            peer.close()
        if left:
            _, left = await asyncio.wait(left, timeout=QUIT_TIMEOUT_S)
        for task in left:
            task.cancel()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who: list[Member] = []

        async def handle(message: Any) -> Message | None:
            if isinstance(message, Hello):
                who.append(self._welcome(message, peer))
                return who[0].setup
            if isinstance(message, CannotStart):
                self._refuse(message)
                return None
            if not who or self._handler is None or self._members.get(who[0].name) is not who[0]:
                return None
            if isinstance(message, CellReady | GatewayReady):
                self._announce(who[0], message)
                return None
            return await self._handler(who[0].name, message)

        peer = Peer(reader, writer, wire=WIRE, handler=handle, name="child")
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._greeted[task] = peer
        try:
            await peer.run()
        except* Exception as group:  # every handler of ours ends here
            if self._on_crash is None:
                raise
            self._on_crash(group)
        finally:
            del self._greeted[task]

    def _welcome(self, hello: Hello, peer: Peer) -> Member:
        member = self._members.get(hello.name)
        if member is None or member.incarnation != hello.incarnation:
            raise BoundaryError("process", f"{hello.name} is not expected", retryable=False)
        member.peer = peer
        peer.name = hello.name
        return member
