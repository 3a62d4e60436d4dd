"""Anthropic's Messages, pure: body to neutral request, errors, models, token counts.

Must not know: HTTP, sessions, tokens. Invariant: a field that would change the meaning and that we
cannot honour is refused, others are tolerated; docs/dialects/anthropic.md lists every one.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec

from opengyre.gateway.dialects.anthropic_answer import Display, MessageAnswer
from opengyre.gateway.dialects.anthropic_content import read_conversation
from opengyre.gateway.dialects.anthropic_tools import read_choice, read_tools
from opengyre.gateway.dialects.dialect import AnswerForm
from opengyre.gateway.dialects.fields import check_only, integer, number, refused, stops, typed
from opengyre.gateway.request import Refusal, RefusalKind, Request, Sampling

_json = msgspec.json.Encoder()
_ONLY: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "compaction": (None,),
    "thread": (None,),
    "output_format": (None,),
}
_ERRORS = {
    RefusalKind.INVALID: "invalid_request_error",
    RefusalKind.UNAUTHORIZED: "authentication_error",
    RefusalKind.NOT_FOUND: "not_found_error",
    RefusalKind.TOO_MANY: "rate_limit_error",
    RefusalKind.UNAVAILABLE: "api_error",
}
_TOO_LARGE = 413


class Anthropic:
    """The Dialect of `/v1/messages`."""

    name = "anthropic"

    def parse(self, body: dict[str, Any]) -> Request:
        check_only(body, _ONLY)
        if typed(body, "output_config", dict, {}).get("format") is not None:
            raise refused("output_config.format", "output_config.format is not supported here")
        _display(body)
        tools = read_tools(body)
        choice, is_parallel = read_choice(body, tools)
        return Request(
            model=typed(body, "model", str, ""),
            messages=read_conversation(body.get("system"), body.get("messages")),
            tools=tools,
            sampling=Sampling(
                temperature=number(body, "temperature", low=0.0, high=2.0),
                top_p=number(body, "top_p", low=0.0, high=1.0),
                top_k=integer(body, "top_k", low=0),
                max_new_tokens=integer(body, "max_tokens", low=1),
                stop=stops(body, "stop_sequences"),
            ),
            choice=choice,
            is_parallel=is_parallel,
            is_stream=typed(body, "stream", bool, False),
        )

    def form(
        self, body: dict[str, Any], request: Request, *, name: str, created_s: int
    ) -> AnswerForm:
        message_id = f"msg_{name.replace('.', '_')}"
        return MessageAnswer(message_id=message_id, model=request.model, display=_display(body))

    def error_json(self, refusal: Refusal) -> bytes:
        kind = _ERRORS[refusal.kind]
        if refusal.status == _TOO_LARGE:
            kind = "request_too_large"
        message = refusal.message
        if refusal.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        return _json.encode({"type": "error", "error": {"type": kind, "message": message}})


DIALECT = Anthropic()


def count_tokens_json(num_tokens: int) -> bytes:
    return _json.encode({"input_tokens": num_tokens})


def models_json(model: str, *, created_s: int) -> bytes:
    page = {"has_more": False, "first_id": model, "last_id": model}
    return _json.encode({"data": [_model(model, created_s)], **page})


def model_json(model: str, *, created_s: int) -> bytes:
    return _json.encode(_model(model, created_s))


def _model(model: str, created_s: int) -> dict[str, Any]:
    created = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    told = {"display_name": model, "created_at": created, "lifecycle": "active"}
    return {"type": "model", "id": model, **told}


def _display(body: dict[str, Any]) -> Display:
    """A client that did not ask for thinking is not shown any: it may not know such blocks."""
    config = typed(body, "thinking", dict, {})
    if config.get("type", "disabled") == "disabled":
        return Display.HIDDEN
    return Display.OMITTED if config.get("display") == "omitted" else Display.SHOWN
