"""The tables of docs/dialects/anthropic.md against the code and the official SDK."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import ContentBlockParam, message_create_params
from anthropic.types.beta import BetaContentBlockParam
from anthropic.types.beta import message_create_params as beta_create_params
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opengyre.gateway.dialects.anthropic import DIALECT
from opengyre.gateway.request import Refusal, Request
from tests.unit.anthropic_desk import BASH, SHOWN, USER, answer, form, parse, refusal_of, refused

DOCS = Path(__file__).parents[2] / "docs" / "dialects" / "anthropic.md"
HONOURED: dict[str, Any] = {
    "model": "other",
    "messages": [{"role": "user", "content": "other"}],
    "system": "s",
    "tools": [BASH],
    "tool_choice": {"type": "none"},
    "max_tokens": 5,
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "stream": True,
    "thinking": SHOWN,
}
TOLERATED: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "service_tier": "auto",
    "speed": "fast",
    "inference_geo": "us",
    "diagnostics": {"previous_message_id": "msg_1"},
    "billing_policy": {"type": "billing_policy"},
    "fallbacks": "default",
    "fallback_credit_token": "t",
}
REFUSED: dict[str, Any] = {
    "container": "c",
    "mcp_servers": [{"name": "x"}],
    "compaction": {"type": "x"},
    "thread": {"type": "create"},
    "output_format": {"type": "json_schema"},
}
IN_HEADERS = {"betas", "user_profile_id", "workspace_id"}


def documented(kind: str, title: str = "Fields of the body") -> set[str]:
    section = DOCS.read_text().partition(f"## {title}")[2].partition("\n## ")[0]
    return {
        name for name, told in re.findall(r"^\| `(\w+)` \| (\w+) ", section, re.M) if told == kind
    }


def told_by(**body: Any) -> tuple[Request, bytes]:
    """All that a body can change: the request and the form of an answer."""
    return parse(**body), form(**body).whole(answer(reasoning="r"))


def test_every_documented_field_does_what_the_table_says() -> None:
    assert documented("honoured") == set(HONOURED)
    assert documented("tolerated") == set(TOLERATED)
    assert documented("refused") == set(REFUSED)
    plain = told_by()
    for name, value in HONOURED.items():
        assert told_by(**{name: value}) != plain, name
    for name, value in TOLERATED.items():
        assert told_by(**{name: value, "no_such_field": 1}) == plain, name
    for name, value in REFUSED.items():
        assert refused(**{name: value}).param == name
        assert told_by(**{name: None}) == plain
    assert refused(output_config={"format": {}}).param == "output_config.format"


def test_every_field_of_the_official_sdk_is_documented() -> None:
    known: set[str] = set()
    for module in (message_create_params, beta_create_params):
        known |= set(get_type_hints(module.MessageCreateParamsBase))
    known |= {"stream"}
    assert known - IN_HEADERS <= set(HONOURED) | set(TOLERATED) | set(REFUSED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", "hot"),
        ("top_p", 2),
        ("top_k", -1),
        ("stop_sequences", [""]),
        ("stream", "yes"),
        ("model", 5),
        ("tools", {}),
        ("thinking", "on"),
        ("output_config", []),
    ],
)
def test_a_malformed_field_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


MINIMAL: dict[str, dict[str, Any]] = {
    "text": {"text": "x"},
    "thinking": {"thinking": "x", "signature": "s"},
    "redacted_thinking": {"data": "x"},
    "tool_use": {"id": "c", "name": "bash", "input": {}},
    "tool_result": {"tool_use_id": "c"},
    "tool_reference": {"tool_name": "bash"},
}


IN_RESULTS = {"text", "tool_reference", "image", "document"}


def block_types() -> set[str]:
    """Of both unions of the official SDK."""
    members = {*get_args(ContentBlockParam), *get_args(BetaContentBlockParam)}
    hints = [get_type_hints(member)["type"] for member in members if isinstance(member, type)]
    return {
        kind for hint in hints for kind in get_args(get_args(hint)[0] or hint) or get_args(hint)
    }


def refusals(block: dict[str, Any]) -> list[Refusal | None]:
    """What a user message, an assistant message and a result say to it."""
    in_result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    sent = (("user", block), ("assistant", block), ("user", in_result))
    return [
        refusal_of({"messages": [{"role": role, "content": [content]}, USER]})
        for role, content in sent
    ]


def test_every_block_of_the_official_sdk_is_read_or_refused_by_its_name() -> None:
    title = "Content blocks"
    read = documented("honoured", title) | documented("tolerated", title)
    assert read == set(MINIMAL)
    assert len(block_types()) > 10
    for kind in block_types() | read | documented("refused", title):
        found = refusals({"type": kind, **MINIMAL.get(kind, {})})
        *in_messages, in_result = found
        assert (None in in_messages) is (kind in read), kind
        assert (in_result is None) is (kind in IN_RESULTS), kind
        assert all(repr(kind) in refusal.message for refusal in found if refusal)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from([*MINIMAL, "image", "x"]) | JSON},
    optional=dict.fromkeys(
        ("text", "thinking", "signature", "id", "name", "input", "tool_use_id"), JSON
    )
    | {"content": JSON | st.lists(st.fixed_dictionaries({"type": st.just("text")}))},
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON},
    optional={"content": JSON | st.lists(BLOCKS | JSON, max_size=4)},
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(TURNS | JSON, max_size=4) | JSON},
    optional={name: JSON for name in [*HONOURED, *TOLERATED, *REFUSED] if name != "messages"},
)


@settings(max_examples=60)
@given(BODIES)
@example({"messages": [{"role": "system"}]})
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    refusal = refusal_of(body)
    if refusal is not None:
        assert refusal.status == 400
        return
    request = DIALECT.parse(body)
    assert request.messages
    assert DIALECT.form(body, request, name="e000001.t1.a0", created_s=0).opening(1)
