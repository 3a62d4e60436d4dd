"""The HTTP server inside an event loop that is not its own.

Must not know: what it serves. Invariants: the port is bound before anyone is told of it; no
signal handler is touched; leaving closes every connection within the grace.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

from starlette.types import ASGIApp
from uvicorn import Config, Server

from opengyre.gateway.protocol import protocol_of_a_server
from opengyre.seams.errors import ConfigError

BACKLOG = 2048
GRACE_S = 3
START_TIMEOUT_S = 10.0


class _Server(Server):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._leaving = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """uvicorn's own wakes ten times a second, to look for signals and to set a date."""
        await self._leaving.wait()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()


@asynccontextmanager
async def serve_gateway(
    app: ASGIApp, sock: socket.socket, *, head_timeout_s: float
) -> AsyncIterator[None]:
    """Serve on the bound socket while inside, then close it. `head_timeout_s`: the longest that a
    connection may take over the head of a request."""
    config = Config(
        app,
        http=protocol_of_a_server(head_timeout_s=head_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )
    server = _Server(config)
    with closing(sock):
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[sock]))
            try:
                await asyncio.wait_for(server.ready.wait(), START_TIMEOUT_S)
                yield
            finally:
                server.leave()
                await asyncio.wait([serving], timeout=2 * GRACE_S)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError when it cannot be had.

    The protocol is named because asyncio sets TCP_NODELAY only then; without it every answer
    would wait 40 ms for an acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the gateway cannot listen on {host}:{port} ({error.strerror}); "
            "give another gateway.port (gyre gateway: --port), or 0 for a free one"
        ) from error
    sock.setblocking(False)
    return sock
