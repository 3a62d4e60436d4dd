"""The tables of docs/dialects say what the dialects do with each field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from opengyre.gateway.dialects.dialect import Dialect
from opengyre.gateway.dialects.openai_chat import OpenAIChat
from opengyre.gateway.dialects.openai_responses import OpenAIResponses
from opengyre.gateway.request import Answer, Ending, Message, Refusal, Request, Role, Usage

PAGES = Path(__file__).parents[2] / "docs" / "dialects"
ROW = re.compile(r"^\| `([\w.]+)` \| (honoured|tolerated|refused) \|", re.MULTILINE)
USER = {"role": "user", "content": "hi"}
DIALECTS: dict[str, tuple[Dialect, type, dict[str, Any]]] = {
    "openai_chat": (
        OpenAIChat(),
        CompletionCreateParamsBase,
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "bash"}}],
            "stream": True,
        },
    ),
    "openai_responses": (
        OpenAIResponses(),
        ResponseCreateParamsBase,
        {"input": [USER], "tools": [{"type": "function", "name": "bash"}], "stream": True},
    ),
}
OTHER_VALUES: dict[str, Any] = {
    "background": True,
    "conversation": "conv_1",
    "echo": True,
    "function_call": {"name": "bash"},
    "functions": [{"name": "bash"}],
    "include": ["reasoning.encrypted_content"],
    "input": "other",
    "instructions": "act",
    "logit_bias": {"5": 1},
    "logprobs": True,
    "messages": [USER, USER],
    "metadata": {"a": "b"},
    "min_p": 0.5,
    "modalities": ["audio"],
    "parallel_tool_calls": False,
    "previous_response_id": "resp_e000001_t1_a0",
    "reasoning.effort": "high",
    "reasoning.summary": "auto",
    "response_format": {"type": "json_object"},
    "seed": 5,
    "stop": "x",
    "store": False,
    "stream": False,
    "stream_options": {"include_obfuscation": False},
    "stream_options.include_usage": True,
    "suffix": "s",
    "text.format": {"type": "json_object"},
    "text.verbosity": "low",
    "tool_choice": "required",
    "tools": [],
    "top_p": 0.5,
}
ROWS = [
    (page, *row) for page in DIALECTS for row in ROW.findall((PAGES / f"{page}.md").read_text())
]


def with_field(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Numbers go for all that is not named above."""
    outer, _, inner = path.partition(".")
    value = OTHER_VALUES.get(path, 2)
    return {**body, outer: {inner: value} if inner else value}


def told(dialect: Dialect, body: dict[str, Any]) -> tuple[Request, list[Any]]:
    """What the request means, and the answer's items without the settings it repeats."""
    request = dialect.parse(body)
    form = dialect.form(body, request, name="e000001.t1.a0", created_s=5)
    message = Message(role=Role.ASSISTANT, text="t", reasoning="r")
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=1)
    whole = json.loads(form.whole(Answer(message=message, ending=Ending.STOP, usage=usage)))
    return request, [whole.get("output"), whole.get("choices")]


@pytest.mark.parametrize(("page", "field", "kind"), ROWS)
def test_a_field_is_treated_as_its_row_says(page: str, field: str, kind: str) -> None:
    dialect, _, body = DIALECTS[page]
    if field == "model":
        assert dialect.parse({**body, "model": "m"}).model == "m"
        return
    changed = with_field(body, field)
    if kind == "refused":
        with pytest.raises(Refusal) as refused:
            dialect.parse(changed)
        assert refused.value.param == field
    else:
        assert (told(dialect, changed) != told(dialect, body)) == (kind == "honoured")


@pytest.mark.parametrize("page", DIALECTS)
def test_every_field_that_the_sdk_can_send_has_a_row(page: str) -> None:
    _, params, body = DIALECTS[page]
    rows = [field for of, field, _ in ROWS if of == page]
    assert len(rows) == len(set(rows))
    assert {*params.__annotations__, *body} <= {field.partition(".")[0] for field in rows}
