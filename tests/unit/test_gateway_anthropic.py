"""The Anthropic dialect: exact event grammar, and conversations that mean the same."""

import base64
import json
import zlib
from typing import Any

import pytest
from anthropic.types import Message as VendorMessage
from anthropic.types import ModelInfo

from opengyre.gateway.dialects.anthropic import DIALECT, count_tokens_json, model_json, models_json
from opengyre.gateway.dialects.anthropic_content import sign
from opengyre.gateway.request import (
    Call,
    CallPiece,
    CallStart,
    ChoiceMode,
    Ending,
    Message,
    ReasoningPiece,
    Refusal,
    RefusalKind,
    Role,
    TextPiece,
)
from tests.unit.anthropic_desk import (
    BASH,
    SHOWN,
    USER,
    answer,
    call_pieces,
    events,
    form,
    messages,
    parse,
    refused,
)


def test_a_stream_has_blocks_one_after_the_other_with_ascending_indexes() -> None:
    told = form(thinking=SHOWN, stream=True)
    data = told.opening(7) + told.delta([ReasoningPiece(text="r"), ReasoningPiece(text="s\n")])
    data += told.delta([TextPiece(text="a"), *call_pieces(0, '{"a": 1}'), TextPiece(text="b")])
    data += told.delta(call_pieces(1, "{}")) + told.closing(answer(Ending.CALLS))
    start, *blocks, delta, stop = events(data)
    assert start["message"]["id"] == "msg_e000001_t7_a0"
    assert start["message"]["usage"]["input_tokens"] == 7
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    kinds = [(e["type"].removeprefix("content_block_"), e["index"]) for e in blocks]
    lengths = [("start", 1), ("delta", 3), ("stop", 1)]
    assert kinds == [
        *[(kind, 0) for kind, num in lengths for _ in range(num)],
        *[(kind, 1) for kind in ("start", "delta", "stop")],
        *[(kind, 2) for kind in ("start", "delta", "delta", "stop")],
        *[(kind, 3) for kind in ("start", "delta", "stop")],
        *[(kind, 4) for kind in ("start", "delta", "delta", "stop")],
    ]
    deltas = [e["delta"] for e in blocks if e["type"] == "content_block_delta"]
    assert deltas[:4] == [
        {"type": "thinking_delta", "thinking": "r"},
        {"type": "thinking_delta", "thinking": "s\n"},
        {"type": "signature_delta", "signature": sign("rs\n")},
        {"type": "text_delta", "text": "a"},
    ]
    assert "".join(d["partial_json"] for d in deltas[4:6]) == '{"a": 1}'
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("ending", "stop_string", "told"),
    [
        (Ending.STOP, "", ("end_turn", None)),
        (Ending.LENGTH, "", ("max_tokens", None)),
        (Ending.CALLS, "", ("tool_use", None)),
        (Ending.STOP_STRING, "END", ("stop_sequence", "END")),
    ],
)
def test_an_ending_is_told_in_both_forms(
    ending: Ending, stop_string: str, told: tuple[str, str | None]
) -> None:
    whole = json.loads(form().whole(answer(ending, stop_string)))
    assert (whole["stop_reason"], whole["stop_sequence"]) == told
    delta = events(form().closing(answer(ending, stop_string)))[0]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == told


def test_a_cut_stream_closes_every_block_that_it_opened() -> None:
    told = form(thinking=SHOWN)
    data = told.delta([CallStart(index=0, call_id="c", name="bash"), CallPiece(index=0, text="{")])
    data += told.closing(answer(Ending.LENGTH))
    kinds = [(e["type"], e.get("index")) for e in events(data)]
    assert kinds[0] == ("content_block_start", 0)
    assert kinds[2:4] == [("content_block_stop", 0), ("message_delta", None)]


def test_thinking_is_shown_omitted_or_hidden_as_the_client_asked() -> None:
    for config, shown in ((SHOWN, "r"), ({**SHOWN, "display": "omitted"}, ""), (None, None)):
        told = form(thinking=config)
        data = told.delta([ReasoningPiece(text="r"), TextPiece(text="t")])
        deltas = [e["delta"] for e in events(data) if "delta" in e]
        whole = json.loads(form(thinking=config).whole(answer(text="t", reasoning="r")))
        if shown is None:
            assert [d["type"] for d in deltas] == ["text_delta"]
            assert [b["type"] for b in whole["content"]] == ["text"]
            continue
        assert "".join(d.get("thinking", "") for d in deltas) == shown
        assert {"type": "signature_delta", "signature": sign("r")} in deltas
        assert whole["content"][0]["thinking"] == shown
        assert whole["content"][0]["signature"] == sign("r")


def test_an_unstreamed_answer_is_the_vendors_message() -> None:
    call = Call(call_id="call_1", name="bash", arguments='{"n": 1.50, "a": "\\u00e9"}')
    data = form(thinking=SHOWN).whole(
        answer(Ending.CALLS, text="t", reasoning="r\n", calls=(call,))
    )
    told = VendorMessage.model_validate_json(data)
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
    assert b'"input":{"n": 1.50, "a": "\\u00e9"}' in data
    assert (told.usage.input_tokens, told.usage.output_tokens) == (7, 3)


@pytest.mark.parametrize("raw", ['{"a": ', "echo", '["a"]', '"a"', '{"a": NaN}', "  ", "3"])
def test_arguments_that_are_no_object_are_wrapped_and_come_back_as_they_were(raw: str) -> None:
    call = Call(call_id="call_1", name="bash", arguments=raw)
    told = VendorMessage.model_validate_json(form().whole(answer(Ending.CALLS, calls=(call,))))
    block = told.content[0].model_dump()
    assert block["input"] == {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    back = messages(USER, {"role": "assistant", "content": [block]}, USER)
    assert back[1].calls == (call,)


def test_absent_arguments_are_an_empty_object() -> None:
    call = Call(call_id="call_1", name="bash", arguments="")
    whole = json.loads(form().whole(answer(calls=(call,))))
    assert whole["content"][0]["input"] == {}


THINKING = "first\n\n  then ünïcode 😀 \n"


@pytest.mark.parametrize("thinking", [THINKING, "again " * 10_000, "x"])
def test_thinking_survives_in_its_signature(thinking: str) -> None:
    block = {"type": "thinking", "thinking": "", "signature": sign(thinking)}
    back = messages(USER, {"role": "assistant", "content": [block]}, USER)
    assert back[1].reasoning == thinking


def test_thinking_that_is_sent_is_what_counts() -> None:
    block = {"type": "thinking", "thinking": "other", "signature": sign("r")}
    back = messages(USER, {"role": "assistant", "content": [block]}, USER)
    assert back[1].reasoning == "other"


@pytest.mark.parametrize(
    "signature", ["EqQBCgYIARgCKkBf+w==", "", "no base64", None, 5, "Z3lyZTE="]
)
def test_foreign_signatures_are_tolerated(signature: Any) -> None:
    shown = {"type": "thinking", "thinking": "r", "signature": signature}
    assert messages(USER, {"role": "assistant", "content": [shown]}, USER)[1].reasoning == "r"
    blank = {**shown, "thinking": ""}
    assert messages(USER, {"role": "assistant", "content": [blank]}, USER)[1].reasoning is None


def test_a_signature_cannot_inflate_to_more_than_a_multiple_of_its_size() -> None:
    bomb = base64.b64encode(b"gyre1" + zlib.compress(b"x" * 10_000_000)).decode()
    block = {"type": "thinking", "thinking": "", "signature": bomb}
    assert messages(USER, {"role": "assistant", "content": [block]}, USER)[1].reasoning is None


def one(content: Any) -> list[Message]:
    return messages({"role": "user", "content": content})


def test_a_conversation_means_the_same_however_it_is_written() -> None:
    text, cached = {"type": "text", "text": "go"}, {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "c", "name": "bash"}
    result = {"type": "tool_result", "tool_use_id": "c"}
    ways: list[list[dict[str, Any]]] = [
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{**use, "input": {"a": 1, "b": 2}}]},
            {"role": "user", "content": [{**result, "content": "ok"}, text]},
        ],
        [
            {"role": "user", "content": [{**text, **cached}]},
            {"role": "assistant", "content": [{**use, "input": {"b": 2, "a": 1}}]},
            {
                "role": "user",
                "content": [
                    {**result, "content": [{"type": "text", "text": "ok"}], "is_error": False},
                    {**text, **cached},
                ],
            },
        ],
        [
            {"role": "user", "content": [text, {"type": "text", "text": ""}]},
            {"role": "assistant", "content": [{"type": "text", "text": ""}]},
            {"role": "assistant", "content": [{**use, "input": {"b": 2, "a": 1}, **cached}]},
            {"role": "user", "content": [{**result, "content": "ok", "is_error": None, **cached}]},
            {"role": "user", "content": "go"},
        ],
    ]
    first, *others = [messages(*way, system="s") for way in ways]
    assert [m.role for m in first] == [
        Role.SYSTEM,
        Role.USER,
        Role.ASSISTANT,
        Role.TOOL,
        Role.USER,
    ]
    assert all(other == first for other in others)
    system = [{"type": "text", "text": "s", **cached}]
    assert messages(*ways[1], system=system) == first


def test_results_keep_the_clients_order_and_text_comes_after_them() -> None:
    content = [
        {"type": "text", "text": "and"},
        {"type": "tool_result", "tool_use_id": "b", "content": None},
        {"type": "tool_result", "tool_use_id": "a", "content": "", "is_error": True},
        {"type": "text", "text": "now"},
    ]
    assert one(content) == [
        Message(role=Role.TOOL, call_id="b"),
        Message(role=Role.TOOL, call_id="a", text="error"),
        Message(role=Role.USER, text="and\nnow"),
    ]


@pytest.mark.parametrize("kind", ["image", "document"])
def test_what_a_tool_brought_and_the_model_cannot_see_becomes_a_note(kind: str) -> None:
    block = {"type": kind, "source": {"type": "base64", "data": "AAAA"}}
    text = {"type": "text", "text": "page 1"}
    inside = {"type": "tool_result", "tool_use_id": "c", "content": [text, block]}
    note = f"[{'an' if kind == 'image' else 'a'} {kind}, which this model cannot see]"
    assert one([inside]) == [Message(role=Role.TOOL, call_id="c", text=f"page 1\n{note}")]
    assert one([{**inside, "content": "read"}, block]) == [
        Message(role=Role.TOOL, call_id="c", text="read"),
        Message(role=Role.USER, text=note),
    ]
    assert refused(messages=[{"role": "user", "content": [text, block]}]).param


def test_blocks_stand_on_lines_of_their_own_without_added_blank_lines() -> None:
    parts = ["<reminder>\n", "do", "it", "\nnow"]
    assert one([{"type": "text", "text": part} for part in parts])[0].text == (
        "<reminder>\ndo\nit\nnow"
    )


def test_an_assistants_text_around_calls_is_one_text() -> None:
    use = {"type": "tool_use", "id": "c", "name": "bash", "input": {}}
    content = [{"type": "text", "text": "a "}, use, {"type": "text", "text": " b"}]
    back = messages(USER, {"role": "assistant", "content": content}, USER)[1]
    assert (back.text, [call.call_id for call in back.calls]) == ("a  b", ["c"])


def test_the_system_role_is_allowed_anywhere_and_the_billing_block_nowhere() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"}
    system = [billing, {"type": "text", "text": "You act."}]
    middle = {"role": "system", "content": "Skills: none"}
    assert [(m.role, m.text) for m in messages(USER, middle, system=system)] == [
        (Role.SYSTEM, "You act."),
        (Role.USER, "hi"),
        (Role.SYSTEM, "Skills: none"),
    ]


@pytest.mark.parametrize(
    ("role", "block", "word"),
    [
        ("user", {"type": "image", "source": {}}, "'image'"),
        ("user", {"type": "document", "source": {}}, "'document'"),
        ("assistant", {"type": "server_tool_use", "id": "s"}, "'server_tool_use'"),
        ("user", {"type": "tool_result", "content": "x"}, "tool_use_id"),
        ("assistant", {"type": "tool_use", "input": {}}, "needs an id and a name"),
        ("user", {"type": "text", "text": 5}, "text must be a string"),
        ("user", "text", "must be a block"),
    ],
)
def test_what_cannot_be_shown_to_the_model_is_refused_by_name(
    role: str, block: Any, word: str
) -> None:
    refusal = refused(messages=[{"role": role, "content": [block]}, USER])
    assert word in refusal.message
    assert refusal.param.startswith("messages[0].content[0]")


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        ([], "non-empty"),
        (None, "non-empty"),
        ([{"content": "x"}], "needs a role"),
        (["x"], "needs a role"),
        ([{"role": "tool", "content": "x"}], "needs a role"),
        ([{"role": ["user"], "content": "x"}], "needs a role"),
        ([{"role": "user", "content": 5}], "string or a list"),
        ([USER, {"role": "assistant", "content": "The answer is ("}], "prefill"),
    ],
)
def test_a_malformed_or_prefilled_conversation_is_refused(sent: Any, word: str) -> None:
    refusal = refused(messages=sent)
    assert word in refusal.message
    assert refusal.kind is RefusalKind.INVALID


def test_tools_become_functions_and_only_the_vendors_own_are_dropped() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    cached = {**BASH, "type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}
    plain = parse(tools=[BASH])
    assert plain.tools == (
        {
            "type": "function",
            "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}},
        },
    )
    assert parse(tools=[search, cached]).tools == plain.tools
    assert "input_schema" in refused(tools=[{"type": "bash_20250124", "name": "bash"}]).message
    assert refused(tools=[BASH, {"name": "x"}]).param == "tools[1]"


@pytest.mark.parametrize(
    ("sent", "mode", "name", "is_parallel"),
    [
        (None, ChoiceMode.AUTO, "", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ChoiceMode.AUTO, "", False),
        ({"type": "any"}, ChoiceMode.REQUIRED, "", True),
        ({"type": "tool", "name": "bash"}, ChoiceMode.NAMED, "bash", True),
        ({"type": "none"}, ChoiceMode.NONE, "", True),
    ],
)
def test_a_tool_choice_is_read(sent: Any, mode: ChoiceMode, name: str, is_parallel: bool) -> None:
    request = parse(tools=[BASH], tool_choice=sent)
    assert (request.choice.mode, request.choice.name) == (mode, name)
    assert request.is_parallel is is_parallel


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "x"}, {"type": "x"}, {}, "auto"]
)
def test_a_choice_that_no_tool_can_meet_is_refused(choice: Any) -> None:
    assert refused(tool_choice=choice).param == "tool_choice"


def test_errors_have_the_vendors_shape_and_kinds() -> None:
    def told(*args: Any, **more: Any) -> tuple[int, str, str]:
        refusal = Refusal(*args, **more)
        value = json.loads(DIALECT.error_json(refusal))
        assert value["type"] == "error"
        return refusal.status, value["error"]["type"], value["error"]["message"]

    assert told("m") == (400, "invalid_request_error", "m")
    assert told("m", kind=RefusalKind.UNAUTHORIZED) == (401, "authentication_error", "m")
    assert told("m", kind=RefusalKind.NOT_FOUND) == (404, "not_found_error", "m")
    assert told("m", status=413) == (413, "request_too_large", "m")
    assert told("m", kind=RefusalKind.TOO_MANY) == (429, "rate_limit_error", "m")
    assert told("m", kind=RefusalKind.UNAVAILABLE) == (503, "api_error", "m")
    _, _, message = told("at most 9 tokens", code="context_length_exceeded")
    assert message == "prompt is too long: at most 9 tokens"


def test_models_and_counts_have_the_vendors_shape() -> None:
    page = json.loads(models_json("policy", created_s=1_800_000_000))
    (model,) = page["data"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "policy", "policy")
    assert json.loads(model_json("policy", created_s=1_800_000_000)) == model
    info = ModelInfo.model_validate(model)
    assert (info.id, info.created_at.timestamp()) == ("policy", 1_800_000_000)
    assert json.loads(count_tokens_json(5)) == {"input_tokens": 5}
