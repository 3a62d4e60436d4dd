"""OpenAI's Responses protocol, pure: body to neutral request, and the form of its answer.

Owns: the fields of a request. Must not know: HTTP, sessions, tokens. Invariants: a field that would
change the meaning and that we cannot honour is refused, others are tolerated; nothing is kept on
our side but the session's turns, so an answer carries all that must come back.
"""

import re
from typing import Any

import msgspec

from opengyre.gateway.dialects.fields import (
    check_only,
    integer,
    number,
    openai_error_json,
    refused,
    stops,
    typed,
)
from opengyre.gateway.dialects.responses_answer import AnswerShape, ResponsesAnswer
from opengyre.gateway.dialects.responses_items import ItemReader, name_of, stem_of
from opengyre.gateway.dialects.responses_tools import ToolTable, read_choice, read_tools
from opengyre.gateway.request import Message, Refusal, Request, Role, Sampling

_json = msgspec.json.Encoder()
_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
}
_ECHOED = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_SEALED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_RESPONSE_ID = re.compile(r"resp_(.+_t\d+_a\d+)")


class OpenAIResponses:
    """The Dialect of `/v1/responses`."""

    name = "openai-responses"

    def parse(self, body: dict[str, Any]) -> Request:
        """Raises Refusal, naming the field, for what is malformed or cannot be honoured."""
        check_only(body, _ONLY)
        _check_text(body)
        _summary(body)
        table = read_tools(body.get("tools"))
        choice = read_choice(body.get("tool_choice"), table)
        options = typed(body, "include", list, [])
        return Request(
            model=typed(body, "model", str, ""),
            messages=_messages(body, table),
            tools=table.tools,
            sampling=_sampling(body),
            choice=choice,
            is_parallel=typed(body, "parallel_tool_calls", bool, True),
            is_stream=typed(body, "stream", bool, False),
            has_usage_event=True,
            has_logprobs=_LOGPROBS in options,
            previous=_previous(body),
            has_instructions=bool(body.get("instructions")),
        )

    def form(
        self, body: dict[str, Any], request: Request, *, name: str, created_s: int
    ) -> ResponsesAnswer:
        is_sealed = _SEALED in (body.get("include") or ()) or body.get("store") is False
        shape = AnswerShape(
            stem=stem_of(name),
            created_s=created_s,
            echo=_echo(body, request),
            table=read_tools(body.get("tools")),
            is_sealed=is_sealed,
            is_summary=_summary(body) is not None,
        )
        return ResponsesAnswer(shape)

    def error_json(self, refusal: Refusal) -> bytes:
        return openai_error_json(refusal)


def input_tokens_json(num_tokens: int) -> bytes:
    """The answer to `/v1/responses/input_tokens`."""
    return _json.encode({"object": "response.input_tokens", "input_tokens": num_tokens})


def _messages(body: dict[str, Any], table: ToolTable) -> tuple[Message, ...]:
    instructions = typed(body, "instructions", str, "")
    first = (Message(role=Role.SYSTEM, text=instructions),) if instructions else ()
    value = body.get("input")
    if isinstance(value, str):
        return (*first, Message(role=Role.USER, text=value))
    if not isinstance(value, list) or not (value or _previous(body)):
        raise refused("input", "input must be a string or a non-empty list of items")
    reader = ItemReader(table)
    for k, item in enumerate(value):
        reader.read(item, f"input[{k}]")
    messages = reader.messages()
    if not messages and not _previous(body):
        raise refused("input", "input holds no message")
    return (*first, *messages)


def _sampling(body: dict[str, Any]) -> Sampling:
    return Sampling(
        temperature=number(body, "temperature", low=0.0, high=2.0),
        top_p=number(body, "top_p", low=0.0, high=1.0),
        top_k=integer(body, "top_k", low=-1),
        min_p=number(body, "min_p", low=0.0, high=1.0),
        max_new_tokens=integer(body, "max_output_tokens", low=1),
        seed=integer(body, "seed", low=-(2**63)),
        stop=stops(body, "stop"),
    )


def _check_text(body: dict[str, Any]) -> None:
    form = typed(body, "text", dict, {}).get("format")
    if form not in (None, {"type": "text"}):
        raise refused("text.format", f"text.format={form!r} is not supported here")


def _summary(body: dict[str, Any]) -> Any:
    """The kind of summary that was asked for, if any; ours is the whole reasoning."""
    reasoning = typed(body, "reasoning", dict, {})
    return reasoning.get("summary") or reasoning.get("generate_summary")


def _previous(body: dict[str, Any]) -> str:
    """The attempt's name in a response's id."""
    told = typed(body, "previous_response_id", str, "")
    match = _RESPONSE_ID.fullmatch(told)
    if told and match is None:
        raise Refusal(
            f"Previous response with id '{told}' not found.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return name_of(match.group(1)) if match else ""


def _echo(body: dict[str, Any], request: Request) -> dict[str, Any]:
    """The request's settings as a response repeats them; tools are encoded once."""
    echo = {name: _first(body.get(name), default) for name, default in _ECHOED.items()}
    tools = msgspec.Raw(_json.encode(body.get("tools") or []))
    return {**echo, "model": request.model, "background": False, "tools": tools}


def _first(sent: Any, default: Any) -> Any:
    return default if sent is None else sent
