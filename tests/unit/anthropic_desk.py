"""Requests, answers and events of the Anthropic dialect, in short.

Must not know: HTTP, any one test.
"""

import json
from typing import Any

import pytest

from opengyre.gateway.dialects.anthropic import DIALECT
from opengyre.gateway.request import (
    Answer,
    Call,
    CallEnd,
    CallPiece,
    CallStart,
    Ending,
    Message,
    Piece,
    Refusal,
    Request,
    Role,
    Usage,
)

USAGE = Usage(num_prompt_tokens=7, num_completion_tokens=3, num_reused_tokens=2)
USER = {"role": "user", "content": "hi"}
BASH = {"name": "bash", "description": "run", "input_schema": {"type": "object"}}
SHOWN = {"type": "adaptive"}


def parse(**body: Any) -> Request:
    return DIALECT.parse({"model": "m", "max_tokens": 9, "messages": [USER], **body})


def messages(*sent: dict[str, Any], **body: Any) -> list[Message]:
    return list(parse(messages=list(sent), **body).messages)


def refused(**body: Any) -> Refusal:
    with pytest.raises(Refusal) as error:
        parse(**body)
    return error.value


def form(**body: Any) -> Any:
    body = {"model": "m", "messages": [USER], **body}
    return DIALECT.form(body, DIALECT.parse(body), name="e000001.t7.a0", created_s=5)


def events(data: bytes) -> list[dict[str, Any]]:
    """Every event's object; its type must be the event's name."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, _, value = block.partition("\n")
        found.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def answer(ending: Ending = Ending.STOP, stop_string: str = "", **message: Any) -> Answer:
    told = Message(role=Role.ASSISTANT, **message)
    return Answer(message=told, ending=ending, usage=USAGE, stop_string=stop_string)


def call_pieces(index: int, arguments: str) -> list[Piece]:
    call = Call(call_id=f"call_{index}", name="bash", arguments=arguments)
    half = len(arguments) // 2
    return [
        CallStart(index=index, call_id=call.call_id, name="bash"),
        CallPiece(index=index, text=arguments[:half]),
        CallPiece(index=index, text=arguments[half:]),
        CallEnd(index=index, call=call),
    ]


def refusal_of(body: dict[str, Any]) -> Refusal | None:
    try:
        DIALECT.parse(body)
    except Refusal as refusal:
        return refusal
    return None
