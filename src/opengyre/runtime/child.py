"""What the gateway and cell processes have in common: connect, say hello, serve, quit.

Invariants: a child ends when its controller's connection ends, whatever it was doing.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from opengyre.runtime.launcher import die_with_parent, run_and_end
from opengyre.runtime.messages import ALL, CannotStart, Done, Hello, Message, Quit
from opengyre.seams.errors import ConfigError, words_of
from opengyre.transport.framed import Peer, Wire, connect

WIRE = Wire(*ALL)
HELLO_TIMEOUT_S = 30.0


async def end_process() -> None:
    """At once, as a kill -9 would: nothing is finished, nobody is told."""
    os._exit(1)


class Child:
    """One connection to the controller and the handler of what it asks. `quit` is set when it says
    so, and when the connection ended; `die` ends the process at once."""

    def __init__(
        self, name: str, incarnation: int, *, die: Callable[[], Awaitable[None]] = end_process
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.quit = asyncio.Event()
        self.is_orphan = False
        self.die = die
        self._address = ""
        self.peer: Peer | None = None
        self._handler: Callable[[Any], Awaitable[Message | None]] | None = None

    async def connect(self, address: str, tasks: asyncio.TaskGroup) -> Any:
        """Say hello; returns the setup message for this process."""
        self._address = address
        self.peer = await connect(
            address, wire=WIRE, handler=self._handle, name=f"{self.name} to controller"
        )
        tasks.create_task(self._serve())
        hello = Hello(name=self.name, incarnation=self.incarnation, pid=os.getpid())
        return await self.peer.call(hello, timeout_s=HELLO_TIMEOUT_S)

    def serve_with(self, handler: Callable[[Any], Awaitable[Message | None]]) -> None:
        self._handler = handler

    def tell(self, message: Message) -> None:
        """Send without an answer."""
        if self.peer is not None:
            self.peer.notify(message)

    async def flush(self) -> None:
        """Wait until the controller takes what was told."""
        if self.peer is not None:
            await self.peer.flush()

    async def give_up(self, reason: str) -> None:
        """Say why this process cannot start, on a connection of its own."""
        peer = await connect(self._address, wire=WIRE, handler=self._handle, name=self.name)
        peer.notify(CannotStart(name=self.name, incarnation=self.incarnation, reason=reason))
        await peer.flush()
        peer.close()

    def hang_up(self) -> None:
        if self.peer is not None:
            self.peer.close()

    async def _serve(self) -> None:
        if self.peer is not None:
            await self.peer.run()
        self.is_orphan = not self.quit.is_set()
        self.quit.set()

    async def _handle(self, message: Any) -> Message | None:
        if isinstance(message, Quit):
            self.quit.set()
            return Done()
        if self._handler is None:
            return None
        return await self._handler(message)


def run_child(main: Callable[[str, Child], Awaitable[None]]) -> None:
    """Entry of a child process: argv is address, name, incarnation."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    address, name, incarnation = sys.argv[1], sys.argv[2], int(sys.argv[3])

    run_and_end(lambda: asyncio.run(_run(main, address, Child(name, incarnation))))


async def _run(main: Callable[[str, Child], Awaitable[None]], address: str, child: Child) -> None:
    """A ConfigError ends the process in order: the controller is told the user's line."""
    try:
        await main(address, child)
    except* ConfigError as group:
        await child.give_up(words_of(group))
