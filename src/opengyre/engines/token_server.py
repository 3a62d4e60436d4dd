"""A token server over HTTP with a scripted engine behind it, for tests, demos and measurements.

`python -m opengyre.engines.token_server --model FOLDER` speaks vLLM's and SGLang's token wires and
plain chat. Owns: the app, the command. Must not know: gateways, tasks. Invariants: a client that
leaves is cancelled at the engine; a request that is frozen has its connection cut, as when the
server dies.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from opengyre.engines.letters import letters_policy
from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine
from opengyre.engines.token_formats import (
    DONE,
    Answering,
    ChatAnswering,
    CompletionAnswering,
    GenerateAnswering,
    SglangAnswering,
)
from opengyre.seams.engine import Chunk, Finish, RequestEngine

Build = Callable[[dict[str, Any]], Answering]
_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_CUT = (Finish.FROZEN, Finish.CANCELLED)
_MAX_EMISSIONS = 1_000_000
_TAIL_TOKENS = 64
ALL_WIRES = frozenset(
    ("/inference/v1/generate", "/v1/completions", "/generate", "/v1/chat/completions")
)


@dataclass(slots=True, kw_only=True)
class TokenServer:
    """`wires` are the paths to serve; `tokenizer` is needed for chat. While `away_until_s`
    (monotonic) is ahead, every request is answered 503. `emissions`: (seconds, prompt's end, number
    of tokens so far) when it was asked and of each chunk, kept if `is_logging`."""

    engine: RequestEngine
    tokenizer: Tokenizer | None = None
    model: str = "scripted"
    wires: frozenset[str] = ALL_WIRES
    is_incremental: bool = True
    is_logging: bool = False
    away_until_s: float = 0.0
    emissions: list[tuple[float, str, int]] = field(default_factory=list)
    _running: dict[str, str] = field(default_factory=dict)

    def app(self) -> Starlette:
        wires: dict[str, Build] = {
            "/inference/v1/generate": GenerateAnswering,
            "/v1/completions": CompletionAnswering,
            "/generate": lambda body: SglangAnswering(body, is_incremental=self.is_incremental),
        }
        if self.tokenizer is not None:
            tokenizer = self.tokenizer
            wires["/v1/chat/completions"] = lambda body: ChatAnswering(body, tokenizer)
        routes = [
            Route(path, _Endpoint(self, build), methods=["POST"])
            for path, build in wires.items()
            if path in self.wires
        ]
        routes += [
            Route("/v1/models", self._tell_models),
            Route("/health", self._tell_health),
            Route("/get_server_info", self._tell_health),
            Route("/abort_request", self._abort, methods=["POST"]),
            Route("/scripted/leave", self._leave, methods=["POST"]),
            Route("/scripted/emissions", self._tell_emissions),
        ]
        return Starlette(routes=routes)

    @property
    def is_away(self) -> bool:
        return time.monotonic() < self.away_until_s

    async def run(self, answering: Answering, send: Send) -> None:
        """Stream one answer; returns early, in mid-answer, if it was cut."""
        request = answering.request
        asked = request.request_id.rpartition("#")[0]
        self._running[asked] = request.request_id
        told = self._tail(request.prompt_ids) if self.is_logging else ""
        num_tokens = 0
        self._log(told, 0)
        try:
            async for chunk in self.engine.submit(request):
                if chunk.finish in _CUT:
                    return
                num_tokens += len(chunk.ids)
                self._log(told, num_tokens)
                failed = chunk.finish is Finish.ERROR
                await send(_part(_error_event(chunk) if failed else answering.event(chunk)))
        finally:
            self._running.pop(asked, None)
        await send(_part(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _log(self, told: str, num_tokens: int) -> None:
        if self.is_logging and len(self.emissions) < _MAX_EMISSIONS:
            self.emissions.append((time.monotonic(), told, num_tokens))

    def _tail(self, prompt_ids: list[int]) -> str:
        ids = prompt_ids[-_TAIL_TOKENS:]
        return str(self.tokenizer.decode(ids)) if self.tokenizer is not None else str(ids)

    async def _tell_models(self, request: Request) -> Response:
        if self.is_away:
            return Response(status_code=503)
        context = self.engine.caps().context_tokens
        model = {"id": self.model, "object": "model", "max_model_len": context}
        return JSONResponse({"object": "list", "data": [model]})

    async def _tell_health(self, request: Request) -> Response:
        return JSONResponse({}, status_code=503 if self.is_away else 200)

    async def _abort(self, request: Request) -> Response:
        body = await request.json()
        running = self._running.get(str(body.get("rid", "")))
        if running is not None:
            await self.engine.cancel(running)
        return JSONResponse({})

    async def _leave(self, request: Request) -> Response:
        """Cut every answer and be away for `for_s`."""
        body = await request.json()
        self.away_until_s = time.monotonic() + float(body.get("for_s", 0.0))
        await self.engine.freeze_all()
        return JSONResponse({})

    async def _tell_emissions(self, request: Request) -> Response:
        told, self.emissions = self.emissions, []
        return Response(msgspec.json.encode(told), media_type="application/json")


class _Endpoint:
    """One wire. A class, because Starlette then hands over the bare ASGI calls."""

    def __init__(self, server: TokenServer, build: Build) -> None:
        self._server = server
        self._build = build

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if self._server.is_away:
            await JSONResponse({"error": "away"}, status_code=503)(scope, receive, send)
            return
        try:
            answering = self._build(msgspec.json.decode(await request.body()))
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            message = {"error": {"message": f"{type(error).__name__}: {error}"}}
            await JSONResponse(message, status_code=400)(scope, receive, send)
            return
        if answering.is_stream:
            await self._stream(answering, receive, send)
        else:
            await self._whole(answering, scope, receive, send)

    async def _stream(self, answering: Answering, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(answering, receive))
            await self._server.run(answering, send)
            watch.cancel()

    async def _watch(self, answering: Answering, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._server.engine.cancel(answering.request.request_id)

    async def _whole(
        self, answering: Answering, scope: Scope, receive: Receive, send: Send
    ) -> None:
        ids: list[int] = []
        logprobs: list[float] = []
        last = Chunk()
        async for last in self._server.engine.submit(answering.request):
            ids += last.ids
            logprobs += last.logprobs
        if last.finish not in (Finish.STOP, Finish.LENGTH):
            await JSONResponse({"error": {"message": last.reason}}, 500)(scope, receive, send)
            return
        body = answering.whole(msgspec.structs.replace(last, ids=ids, logprobs=logprobs))
        await Response(body, media_type="application/json")(scope, receive, send)


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _error_event(chunk: Chunk) -> bytes:
    error = {"error": {"message": chunk.reason, "code": 500}}
    return b"data: " + msgspec.json.encode(error) + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--num-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="0: as fast as it can")
    parser.add_argument("--max-running", type=int, default=4096)
    parser.add_argument("--context-tokens", type=int, default=32768)
    parser.add_argument("--wire", action="append", choices=sorted(ALL_WIRES), help="default: all")
    parser.add_argument("--cumulative", action="store_true", help="SGLang's events without deltas")
    parser.add_argument("--log-emissions", action="store_true")
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
    config = ScriptedConfig(
        tokens_per_s=asked.tokens_per_s,
        max_running=asked.max_running,
        context_tokens=asked.context_tokens,
    )
    server = TokenServer(
        engine=ScriptedEngine(letters_policy(tokenizer, asked.num_tokens), config),
        tokenizer=tokenizer,
        wires=frozenset(asked.wire or ALL_WIRES),
        is_incremental=not asked.cumulative,
        is_logging=asked.log_emissions,
    )
    uvicorn.run(
        server.app(),
        host=asked.host,
        port=asked.port,
        http="httptools",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        backlog=4096,
    )


if __name__ == "__main__":
    main()
