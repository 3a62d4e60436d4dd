"""The OpenAI chat dialect: exact event grammar, and fields that mean the same."""

import json
from typing import Any

import pytest

from opengyre.gateway.dialects.openai_chat import ChatAnswer, OpenAIChat
from opengyre.gateway.request import (
    Answer,
    Call,
    CallEnd,
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
    TokenLogprob,
    Usage,
)

USAGE = Usage(num_prompt_tokens=7, num_completion_tokens=3, num_reused_tokens=2)
CALL = Call(call_id="call_1", name="bash", arguments='{"a": 1}')
USER = {"role": "user", "content": "hi"}
DIALECT = OpenAIChat()
parse, error_json = DIALECT.parse, DIALECT.error_json


def form(**body: Any) -> ChatAnswer:
    request = parse({"model": "m", "messages": [USER], **body})
    return ChatAnswer(request, answer_id="chatcmpl-1", created_s=5)


def events(data: bytes) -> list[Any]:
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def test_a_stream_is_role_deltas_one_finish_reason_usage_and_done() -> None:
    answer = form(stream=True, stream_options={"include_usage": True})
    pieces = [
        ReasoningPiece(text="r"),
        TextPiece(text="t"),
        CallStart(index=0, call_id="call_1", name="bash"),
        CallPiece(index=0, text='{"a":'),
        CallPiece(index=0, text=" 1}"),
        CallEnd(index=0, call=CALL),
    ]
    ended = Answer(message=Message(role=Role.ASSISTANT), ending=Ending.CALLS, usage=USAGE)
    data = answer.opening(7) + answer.delta(pieces) + answer.closing(ended)
    *chunks, usage, done = events(data)
    assert done == "[DONE]"
    assert {c["object"] for c in [*chunks, usage]} == {"chat.completion.chunk"}
    assert {(c["id"], c["created"], c["model"]) for c in chunks} == {("chatcmpl-1", 5, "m")}
    opened = {"index": 0, "id": "call_1", "type": "function"}
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "r"},
        {"content": "t"},
        {"tool_calls": [{**opened, "function": {"name": "bash", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 6 + ["tool_calls"]
    assert all(c["usage"] is None for c in chunks)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 10)


def test_without_the_option_no_event_speaks_of_usage() -> None:
    ended = Answer(message=Message(role=Role.ASSISTANT), ending=Ending.STOP, usage=USAGE)
    assert b"usage" not in form(stream=True).closing(ended)


def test_asked_for_log_probabilities_go_with_the_first_event_of_their_tokens() -> None:
    told = TokenLogprob(text="t", data=b"t", logprob=-0.5)
    expected = {"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []}
    streamed = form(stream=True, logprobs=True).delta([TextPiece(text="t")], [told])
    (event,) = events(streamed)
    assert event["choices"][0]["logprobs"]["content"] == [expected]
    (held,) = events(form(stream=True, logprobs=True).delta([], [told]))
    assert held["choices"][0]["delta"] == {}
    message = Message(role=Role.ASSISTANT, text="t")
    answer = Answer(message=message, ending=Ending.STOP, usage=USAGE, logprobs=(told,))
    whole = json.loads(form(logprobs=True).whole(answer))
    assert whole["choices"][0]["logprobs"]["content"] == [expected]
    assert json.loads(form().whole(answer))["choices"][0]["logprobs"] is None


def test_a_demanded_call_names_a_tool_that_is_there() -> None:
    tool = {"type": "function", "function": {"name": "bash"}}
    named = {"type": "function", "function": {"name": "bash"}}
    body = {"messages": [USER], "tools": [tool]}
    assert parse({**body, "tool_choice": named}).choice.name == "bash"
    assert parse({**body, "tool_choice": "required"}).choice.mode is ChoiceMode.REQUIRED
    assert parse({**body, "tool_choice": "none"}).offered_tools == ()
    other = {"type": "function", "function": {"name": "other"}}
    for wrong in [{**body, "tool_choice": other}, {"messages": [USER], "tool_choice": "required"}]:
        with pytest.raises(Refusal) as refused:
            parse(wrong)
        assert refused.value.param == "tool_choice"


def test_an_unstreamed_answer_has_null_content_beside_calls() -> None:
    message = Message(role=Role.ASSISTANT, calls=(CALL,), reasoning="r")
    whole = json.loads(form().whole(Answer(message=message, ending=Ending.CALLS, usage=USAGE)))
    (choice,) = whole["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "r"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
    ],
)
def test_content_in_any_of_its_forms_is_the_same_text(content: Any, text: str) -> None:
    request = parse({"messages": [USER, {"role": "assistant", "content": content}]})
    assert request.messages[1].text == text
    assert parse({"messages": [USER, {"role": "assistant"}]}).messages[1].text == ""


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls[0]"),
        ("hi", "messages[0]"),
    ],
)
def test_a_malformed_message_is_named(message: Any, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse({"messages": [message]})
    assert refused.value.param == param


def test_unknown_fields_are_tolerated_and_harmless_values_accepted() -> None:
    body = {"messages": [USER], "n": 1, "logprobs": False, "user": "x", "store": False}
    assert parse({**body, "parallel_tool_calls": True, "brand_new": {}}).messages[0].text == "hi"


def test_errors_have_the_four_fields() -> None:
    told = json.loads(error_json(Refusal("no", kind=RefusalKind.UNAUTHORIZED, code="c")))
    assert told == {
        "error": {"message": "no", "type": "authentication_error", "param": None, "code": "c"}
    }


def test_a_picture_among_the_results_of_tools_is_told_in_words() -> None:
    parts = [{"type": "text", "text": "seen: "}, {"type": "image_url", "image_url": {"url": "x"}}]
    (message,) = parse({"messages": [{"role": "tool", "content": parts}]}).messages
    assert message.text == "seen: [an image, which this model cannot see]"


@pytest.mark.parametrize("role", [[], {}, None, 7, "nobody"])
def test_a_role_that_is_none_is_refused(role: Any) -> None:
    with pytest.raises(Refusal) as refused:
        parse({"messages": [{"role": role, "content": "x"}]})
    assert refused.value.param == "messages[0]"
