"""The HTTP surface: an allow-list of paths below each execution's own, and its key.

Owns: routes, authentication, error answers. Must not know: tokens, engines. Invariants: nothing
is told to a caller without the execution's key, not even which executions exist; every refusal
has the shape of the protocol that was spoken.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from starlette.types import Receive, Scope, Send

from opengyre.gateway.connection import ClientLeft, Connection
from opengyre.gateway.dialects import anthropic, openai_chat, openai_responses
from opengyre.gateway.dialects.dialect import Dialect
from opengyre.gateway.dialects.registry import ANTHROPIC, OPENAI_CHAT, OPENAI_RESPONSES
from opengyre.gateway.exchange import answer_json, refuse
from opengyre.gateway.request import Refusal, RefusalKind

DEFAULT_EXECUTION = "default"
_MAX_TOLD_CHARS = 200


class _Operation(StrEnum):
    """What is asked, by the end of the path."""

    CHAT = "chat/completions"
    RESPONSES = "responses"
    INPUT_TOKENS = "responses/input_tokens"
    MESSAGES = "messages"
    COUNT_TOKENS = "messages/count_tokens"
    MODELS = "models"
    UNKNOWN = ""


_ENDS = [(one, one.split("/")) for one in _Operation if one is not _Operation.UNKNOWN]
_DIALECTS = {
    _Operation.CHAT: OPENAI_CHAT,
    _Operation.RESPONSES: OPENAI_RESPONSES,
    _Operation.INPUT_TOKENS: OPENAI_RESPONSES,
    _Operation.MESSAGES: ANTHROPIC,
    _Operation.COUNT_TOKENS: ANTHROPIC,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One model call: whose, how it speaks, and its connection, whose body was not read."""

    execution: str
    dialect: Dialect
    connection: Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """What the HTTP side needs of the gateway.

    `is_allowed(execution, keys)`: one of the keys sent opens it. `complete` answers one call,
    `count_tokens` tells the length of its prompt; both may raise Refusal.
    """

    is_allowed: Callable[[str, list[str]], Awaitable[bool]]
    complete: Callable[[Asked], Awaitable[None]]
    count_tokens: Callable[[Asked], Awaitable[int]]
    model: str
    created_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A path, read: `/{execution}/any/prefix/v1/{operation}`. `model` with MODELS."""

    path: str
    execution: str
    operation: _Operation
    model: str = ""


class GatewayApp:
    """The ASGI application: every path goes here, so that refusals look the same everywhere."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send)
        target = _read_path(scope["path"])
        dialect = _DIALECTS.get(target.operation) or _spoken(connection)
        try:
            await self._answer(scope["method"], target, dialect, connection)
        except Refusal as refusal:
            await refuse(connection, refusal, dialect.error_json(refusal))
        except ClientLeft:
            await connection.gone()

    async def _answer(
        self, method: str, target: _Target, dialect: Dialect, connection: Connection
    ) -> None:
        if method == "HEAD" and target.operation is _Operation.UNKNOWN:
            raise Refusal("nothing here", kind=RefusalKind.NOT_FOUND)
        if not await self._surface.is_allowed(target.execution, _keys_sent(connection)):
            raise Refusal("unknown execution or wrong API key", kind=RefusalKind.UNAUTHORIZED)
        asked = Asked(execution=target.execution, dialect=dialect, connection=connection)
        match method, target.operation:
            case "POST", _Operation.CHAT | _Operation.RESPONSES | _Operation.MESSAGES:
                await self._surface.complete(asked)
            case "POST", _Operation.COUNT_TOKENS:
                num_tokens = await self._surface.count_tokens(asked)
                await answer_json(connection, anthropic.count_tokens_json(num_tokens))
            case "POST", _Operation.INPUT_TOKENS:
                num_tokens = await self._surface.count_tokens(asked)
                await answer_json(connection, openai_responses.input_tokens_json(num_tokens))
            case "GET" | "HEAD", _Operation.MODELS:
                await answer_json(connection, self._models(target, dialect))
            case _:
                what = f"no such path: {method} {target.path[:_MAX_TOLD_CHARS]}"
                raise Refusal(what, kind=RefusalKind.NOT_FOUND)

    def _models(self, target: _Target, dialect: Dialect) -> bytes:
        known, created_s = self._surface.model, self._surface.created_s
        if target.model not in ("", known):
            raise Refusal(f"no such model: {target.model}", kind=RefusalKind.NOT_FOUND)
        is_anthropic = dialect is ANTHROPIC
        if target.model:
            one = anthropic.model_json if is_anthropic else openai_chat.model_json
            return one(known, created_s=created_s)
        every = anthropic.models_json if is_anthropic else openai_chat.models_json
        return every(known, created_s=created_s)


def _read_path(path: str) -> _Target:
    """A path that begins with `v1` or the operation itself is the default execution's."""
    parts = [part for part in path.split("/") if part]
    operation, model, num_rest = _operation(parts)
    before = parts[: len(parts) - num_rest]
    execution = before[0] if before and before[0] != "v1" else DEFAULT_EXECUTION
    return _Target(path=path, execution=execution, operation=operation, model=model)


def _operation(parts: list[str]) -> tuple[_Operation, str, int]:
    """(operation, model, how many parts of the path they took)."""
    if parts[-2:-1] == ["models"]:
        return _Operation.MODELS, parts[-1], 2
    for operation, wanted in _ENDS:
        if parts[-len(wanted) :] == wanted:
            return operation, "", len(wanted)
    return _Operation.UNKNOWN, "", 0


def _spoken(connection: Connection) -> Dialect:
    """The protocol of a path that belongs to none."""
    return ANTHROPIC if connection.header("anthropic-version") else OPENAI_CHAT


def _keys_sent(connection: Connection) -> list[str]:
    scheme, _, token = connection.header("authorization").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, connection.header("x-api-key")) if key]
