"""The HTTP surface: an allow-list of paths below each execution's own, and its key.

Owns: routes, authentication, error answers. Must not know: tokens, engines. Invariants: nothing
is told to a caller without the execution's key, not even which executions exist; keys are compared
in constant time; every refusal has the protocol's shape.
"""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from opengyre.gateway.connection import ClientLeft, Connection
from opengyre.gateway.dialects import openai_chat
from opengyre.gateway.exchange import refuse
from opengyre.gateway.request import Refusal, RefusalKind

_NO_KEY = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """What the HTTP side needs of the gateway. `keys` by execution, live.

    `complete(execution, connection, body)` answers one call or raises Refusal.
    """

    keys: Mapping[str, str]
    complete: Callable[[str, Connection, bytes], Awaitable[None]]
    model: str
    created_s: int


class _Endpoint:
    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send)
        try:
            await self._answer(scope, connection)
        except Refusal as refusal:
            await refuse(connection, refusal, openai_chat.error_json(refusal))
        except ClientLeft:
            return

    async def _answer(self, scope: Scope, connection: Connection) -> None:
        execution, _, rest = scope["path"].lstrip("/").partition("/")
        if not _is_key(connection, self._surface.keys.get(execution)):
            raise Refusal("unknown execution or wrong API key", kind=RefusalKind.UNAUTHORIZED)
        match scope["method"], _operation(rest):
            case "POST", "chat/completions":
                body = await connection.read_body()
                await self._surface.complete(execution, connection, body)
            case "GET" | "HEAD", "models":
                await self._tell_models(connection)
            case _:
                raise Refusal(f"no such path: {rest}", kind=RefusalKind.NOT_FOUND)

    async def _tell_models(self, connection: Connection) -> None:
        body = openai_chat.models_json(self._surface.model, created_s=self._surface.created_s)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await connection.begin(200, headers)
        await connection.write(body)
        await connection.end()


def make_app(surface: Surface) -> Starlette:
    """Every path goes to one endpoint, so that refusals look the same everywhere."""
    return Starlette(routes=[Route("/{path:path}", endpoint=_Endpoint(surface))])


def _operation(rest: str) -> str:
    """The end of the path that names what is asked, after any prefix."""
    parts = [part for part in rest.split("/") if part]
    for name in ("chat/completions", "models"):
        wanted = name.split("/")
        if parts[-len(wanted) :] == wanted:
            return name
    return ""


def _is_key(connection: Connection, key: str | None) -> bool:
    scheme, _, sent = connection.header("authorization").partition(" ")
    sent = sent.strip() if scheme.lower() == "bearer" else connection.header("x-api-key")
    is_same = hmac.compare_digest(sent.encode(), (key or _NO_KEY).encode())
    return is_same and key is not None
