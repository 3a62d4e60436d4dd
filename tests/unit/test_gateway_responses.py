"""The Responses dialect: exact event grammar, and answers that come back as the same message."""

import json
from collections.abc import Iterator
from typing import Any

import openai.types.responses as sdk
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from opengyre.gateway.dialects.openai_responses import OpenAIResponses
from opengyre.gateway.dialects.responses_answer import ResponsesAnswer
from opengyre.gateway.dialects.responses_items import seal, unseal
from opengyre.gateway.request import (
    Answer,
    Call,
    CallEnd,
    CallPiece,
    CallStart,
    ChoiceMode,
    Ending,
    Message,
    Piece,
    ReasoningPiece,
    Refusal,
    Role,
    TextPiece,
    TokenLogprob,
    ToolChoice,
    Usage,
)

DIALECT = OpenAIResponses()
USAGE = Usage(num_prompt_tokens=7, num_completion_tokens=3, num_reused_tokens=2)
NAME = "e000123.t7.a0"
STEM = "e000123_t7_a0"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "bash", "description": "d", "parameters": {"type": "object"}},
    {"type": "web_search", "external_web_access": True},
    {
        "type": "namespace",
        "name": "agents",
        "description": "n",
        "tools": [{"type": "function", "name": "spawn"}, {"type": "function", "name": "bash"}],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "p",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    },
]
EVENT: TypeAdapter[Any] = TypeAdapter(sdk.ResponseStreamEvent)


def parse(given: Any = "hi", **body: Any) -> Any:
    return DIALECT.parse({"model": "m", "input": given, **body})


def form(**body: Any) -> ResponsesAnswer:
    whole = {"model": "m", "input": "hi", "tools": TOOLS, **body}
    return DIALECT.form(whole, DIALECT.parse(whole), name=NAME, created_s=5)


def events(data: bytes) -> list[dict[str, Any]]:
    """Each is valid for the SDK's typed models, and named twice alike."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        named, told = block.split("\n")
        event = json.loads(told.removeprefix("data: "))
        assert named == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    return found


def pieces_of(message: Message) -> Iterator[Piece]:
    """In small parts, as they are sampled."""
    for text in message.reasoning or "":
        yield ReasoningPiece(text=text)
    for text in message.text:
        yield TextPiece(text=text)
    for k, call in enumerate(message.calls):
        yield CallStart(index=k, call_id=call.call_id, name=call.name)
        for text in call.arguments:
            yield CallPiece(index=k, text=text)
        yield CallEnd(index=k, call=call)


def call(k: int, name: str = "bash", arguments: str = '{"a":  1}') -> Call:
    return Call(call_id=f"call_{STEM}_{k}", name=name, arguments=arguments)


def said(text: str = "", reasoning: str | None = None, *calls: Call) -> Message:
    return Message(role=Role.ASSISTANT, text=text, reasoning=reasoning, calls=calls)


def finished(message: Message, ending: Ending = Ending.STOP) -> Answer:
    return Answer(message=message, ending=ending, usage=USAGE)


def streamed(message: Message, ending: Ending = Ending.STOP, **body: Any) -> list[dict[str, Any]]:
    answer = form(stream=True, **body)
    data = answer.opening(7)
    for piece in pieces_of(message):
        data += answer.delta([piece])
    return events(data + answer.closing(finished(message, ending)))


ANSWERS = {
    "nothing": said(),
    "text": said("hello"),
    "thoughts": said("", "only thought"),
    "all": said("look", "think\n\n hard", call(0), call(1, "agents__spawn", "{}")),
    "same name in a namespace": said("", None, call(0), call(1, "agents__bash")),
    "custom": said("", None, call(0, "apply_patch", '{"input": "*** Begin\\n\\u00e9"}')),
    "custom as it should not be": said("", None, call(0, "apply_patch", '{"patch": 1}')),
    "custom and no JSON": said("", None, call(0, "apply_patch", "{not")),
    "unknown tool": said("", "r", call(0, "nobody", "{not json")),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "stored": {},
    "sealed": {"store": False},
    "codex": {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
    },
}


def test_the_events_of_a_text_in_their_order() -> None:
    found = streamed(said("ab"))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in found] == list(range(10))
    assert found[0]["response"]["output"] == []
    assert {event["item_id"] for event in found if "item_id" in event} == {f"msg_{STEM}_0"}
    response = found[-1]["response"]
    assert (response["id"], response["status"]) == (f"resp_{STEM}", "completed")
    assert response["usage"]["total_tokens"] == 10
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2


def test_reasoning_and_calls_have_events_of_their_own() -> None:
    found = streamed(said("", "r", call(0, arguments="{}")), Ending.CALLS)
    assert [event["type"].removeprefix("response.") for event in found[2:-1]] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [event["output_index"] for event in found[2:-1]] == [0] * 6 + [1] * 5
    opened = found[8]["item"]
    assert (opened["arguments"], opened["status"]) == ("", "in_progress")
    assert found[-2]["item"]["id"] == f"fc_{STEM}_1"
    assert found[-2]["item"]["arguments"] == "{}"


def test_a_summary_is_told_where_one_was_asked_for() -> None:
    found = streamed(said("", "r"), **SETTINGS["codex"])
    assert [event["type"].removeprefix("response.") for event in found[2:-1]] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = found[-2]["item"]
    assert item["summary"] == [{"type": "summary_text", "text": "r"}]
    assert unseal(item["encrypted_content"]) == "r"
    assert "content" not in item


def test_a_custom_call_is_told_with_its_input_and_a_namespace_with_its_own_names() -> None:
    patch = call(0, "apply_patch", '{"input": "x\\ny"}')
    found = streamed(said("", None, patch, call(1, "agents__spawn", "{}")), Ending.CALLS)
    custom, function = found[-1]["response"]["output"]
    assert (custom["type"], custom["name"], custom["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "x\ny",
    )
    assert (function["name"], function["namespace"]) == ("spawn", "agents")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_stream_ends_with_the_whole_answer(answer: str, settings: str) -> None:
    message, body = ANSWERS[answer], SETTINGS[settings]
    found = streamed(message, **body)
    whole = json.loads(form(**body).whole(finished(message)))
    sdk.Response.model_validate(whole)
    assert found[-1]["response"] == whole
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_the_deltas_of_an_item_join_to_its_text(answer: str, settings: str) -> None:
    joined: dict[int, str] = {}
    told: dict[int, str] = {}
    for event in streamed(ANSWERS[answer], **SETTINGS[settings]):
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            joined[at] = joined.get(at, "") + event["delta"]
        for name in ("text", "arguments", "input"):
            if name in event:
                told[event["output_index"]] = event[name]
    assert joined == {at: text for at, text in told.items() if text}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("answer", [name for name in ANSWERS if name != "nothing"])
def test_an_answer_comes_back_as_exactly_its_message(answer: str, settings: str) -> None:
    message = ANSWERS[answer]
    output = streamed(message, **SETTINGS[settings])[-1]["response"]["output"]
    request = parse([{"role": "user", "content": "hi"}, *output], tools=TOOLS)
    assert request.messages[1:] == (message_value(message),)


def message_value(message: Message) -> Message:
    """Custom input is written anew: the same value, not the same string."""
    calls = []
    for one in message.calls:
        if one.name == "apply_patch" and '"input"' in one.arguments:
            again = json.dumps(json.loads(one.arguments), ensure_ascii=False)
            one = Call(call_id=one.call_id, name=one.name, arguments=again)
        calls.append(one)
    return said(message.text, message.reasoning, *calls)


def test_what_a_harness_changes_in_items_does_not_change_the_message() -> None:
    message = ANSWERS["all"]
    output = streamed(message, **SETTINGS["codex"])[-1]["response"]["output"]
    for item in output:
        item.pop("status", None)
        item.pop("id")
    output[0]["summary"] = [{"type": "summary_text", "text": "think hard"}]
    output[0]["content"] = None
    assert parse(output, tools=TOOLS).messages == (message,)


@pytest.mark.parametrize("has_ids", [True, False])
def test_results_between_the_calls_of_one_answer_do_not_divide_it(has_ids: bool) -> None:
    message = said("look", None, call(0), call(1))
    output = streamed(message)[-1]["response"]["output"]
    for item in output:
        item["id"] = item["id"] if has_ids else None
    given = [
        *output[:2],
        {"type": "function_call_output", "call_id": f"call_{STEM}_0", "output": "zero"},
        output[2],
        {"type": "function_call_output", "call_id": f"call_{STEM}_1", "output": "one"},
    ]
    first, *results = parse(given).messages
    assert first == message
    assert [(one.role, one.text, one.call_id[-1]) for one in results] == [
        (Role.TOOL, "zero", "0"),
        (Role.TOOL, "one", "1"),
    ]


def test_references_to_the_items_of_an_answer_stand_for_it() -> None:
    output = streamed(ANSWERS["all"])[-1]["response"]["output"]
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    answer = Message(role=Role.ASSISTANT, reference=NAME)
    assert parse(references).messages == (answer,)
    mixed = [{"id": output[0]["id"]}, output[1], {"id": output[2]["id"]}, output[3]]
    result = {"type": "function_call_output", "call_id": "x", "output": "o"}
    assert parse([*mixed, result, references[3]]).messages[0] == answer
    assert len(parse([*mixed, result, references[3]]).messages) == 2
    assert parse([references[0], *output[1:]]).messages[0].text == "look"


def test_answers_one_after_the_other_stay_two() -> None:
    text = {"type": "message", "role": "assistant", "content": "a"}
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "r"}],
    }
    assert parse([text, text]).messages == (said("a"), said("a"))
    assert parse([thought, text, thought, text]).messages == (said("a", "r"), said("a", "r"))


def test_what_a_client_kept_of_a_cut_answer_stays_apart_from_the_answer_that_came_then() -> None:
    kept = streamed(said("look", "r"))[-1]["response"]["output"]
    body = {"input": "hi"}
    again = DIALECT.form(body, DIALECT.parse(body), name="e000123.t8.a0", created_s=5)
    later = said("", "r", Call(call_id="call_e000123_t8_a0_0", name="bash", arguments="{}"))
    output = json.loads(again.whole(finished(later)))["output"]
    assert parse([*kept, *output]).messages == (said("look", "r"), later)
    assert parse([kept[0], *output]).messages == (said("", "r"), later)
    assert parse([*kept, output[1]]).messages == (said("look", "r"), said("", None, *later.calls))


def test_every_kind_of_input_is_read() -> None:
    request = parse(
        [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "o"}, {"type": "input_image"}],
            },
            {"type": "item_reference", "id": "rs_1"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
        instructions="i",
        tools=TOOLS,
    )
    roles = [Role.SYSTEM, Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL]
    assert [one.role for one in request.messages] == roles
    assert [one.text for one in request.messages[:3]] == ["i", "d", "u"]
    assert request.messages[3].calls[0].arguments == '{"input": "x"}'
    assert request.messages[4].text == "o[an image, which this model cannot see]"
    assert parse("just text").messages == (Message(role=Role.USER, text="just text"),)


def test_tools_are_functions_with_names_of_their_own() -> None:
    tools = parse(tools=[*TOOLS, {"type": "function", "name": "agents__spawn"}]).tools
    functions = [tool["function"] for tool in tools]
    assert [one["name"] for one in functions] == [
        "bash",
        "agents__spawn",
        "agents__bash",
        "apply_patch",
        "agents__spawn_",
    ]
    assert functions[0] == {"name": "bash", "description": "d", "parameters": {"type": "object"}}
    assert "start: x" in functions[3]["parameters"]["properties"]["input"]["description"]


@pytest.mark.parametrize(
    ("choice", "mode", "name", "num_tools"),
    [
        ("auto", ChoiceMode.AUTO, "", 4),
        ("none", ChoiceMode.NONE, "", 4),
        ("required", ChoiceMode.REQUIRED, "", 4),
        ({"type": "function", "name": "bash"}, ChoiceMode.NAMED, "bash", 4),
        ({"type": "custom", "name": "apply_patch"}, ChoiceMode.NAMED, "apply_patch", 4),
        (
            {"type": "function", "name": "spawn", "namespace": "agents"},
            ChoiceMode.NAMED,
            "agents__spawn",
            4,
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "bash"}],
            },
            ChoiceMode.REQUIRED,
            "",
            1,
        ),
    ],
)
def test_a_tool_choice_is_honoured(
    choice: Any, mode: ChoiceMode, name: str, num_tools: int
) -> None:
    request = parse(tools=TOOLS, tool_choice=choice)
    assert request.choice == ToolChoice(mode=mode, name=name)
    assert len(request.tools) == num_tools


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": {}}]}, "input[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": ["x"]}]}, "tools[0].tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"previous_response_id": "resp_68a"}, "previous_response_id"),
        ({"reasoning": "high"}, "reasoning"),
    ],
)
def test_what_cannot_be_honoured_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        DIALECT.parse({"input": "hi", **body})
    assert refused.value.param == param
    told = json.loads(DIALECT.error_json(refused.value))["error"]
    assert (told["type"], told["param"]) == ("invalid_request_error", param)


def test_a_previous_response_is_the_attempt_in_its_id() -> None:
    for name in (NAME, "default.t1.a12", "my_own.run.t3.a0"):
        body = {"input": "hi"}
        answer = DIALECT.form(body, DIALECT.parse(body), name=name, created_s=5)
        told = json.loads(answer.whole(finished(said("x"))))["id"]
        assert parse(previous_response_id=told).previous == name


def test_sealed_reasoning_opens_only_if_it_is_ours() -> None:
    assert unseal(seal("ünï\n code ")) == "ünï\n code "
    for foreign in (None, "", "gAAAAABo", "gyre1.%%%", "gyre1./w=="):
        assert unseal(foreign) is None
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    text = {"role": "assistant", "content": "a"}
    assert parse([item, text]).messages == (said("a"),)


def test_a_cut_answer_is_incomplete_and_so_is_its_open_item() -> None:
    last = streamed(said("half"), Ending.LENGTH)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_log_probabilities_stand_with_the_text_if_they_were_asked_for() -> None:
    told = [TokenLogprob(text=text, data=text.encode(), logprob=-0.5) for text in "ab"]
    answer = form(include=["message.output_text.logprobs"])
    assert parse(include=["message.output_text.logprobs"]).has_logprobs
    data = answer.opening(1)
    for one in told:
        data += answer.delta([TextPiece(text=one.text)], [one])
    message = said("ab")
    data += answer.closing(
        Answer(message=message, ending=Ending.STOP, usage=USAGE, logprobs=tuple(told))
    )
    found = events(data)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in event["logprobs"]] for event in deltas] == [["a"], ["b"]]
    (part,) = found[-1]["response"]["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["a", "b"]


def test_pieces_may_come_in_any_batches() -> None:
    message = ANSWERS["all"]
    pieces = list(pieces_of(message))
    one_by_one = streamed(message)
    for size in (2, 3, 1000):
        answer = form(stream=True)
        data = answer.opening(7)
        for start in range(0, len(pieces), size):
            data += answer.delta(pieces[start : start + size])
        assert events(data + answer.closing(finished(message))) == one_by_one


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
ITEM_FIELDS = ("role", "content", "id", "call_id", "name", "namespace", "arguments", "input")
ITEM_TYPES = ("message", "reasoning", "function_call", "custom_tool_call", "function_call_output")
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "x"])}, optional={"text": JSON}
)
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(ITEM_TYPES) | JSON},
    optional={
        "role": st.sampled_from(["user", "assistant"]) | JSON,
        "content": st.lists(PARTS | JSON, max_size=2) | JSON,
        "summary": st.lists(PARTS | JSON, max_size=2) | JSON,
        "output": st.lists(PARTS | JSON, max_size=2) | JSON,
        "encrypted_content": st.sampled_from(["gyre1.", "gyre1.AA==", "gyre1.é"]) | JSON,
        **{field: st.text(max_size=3) | JSON for field in ITEM_FIELDS[2:]},
    },
)
TOOL_VALUES = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace"]) | JSON},
    optional={
        "name": st.text(max_size=2) | JSON,
        "tools": JSON,
        "format": JSON,
        "parameters": JSON,
    },
)
BODIES = st.fixed_dictionaries(
    {"input": st.lists(ITEMS | JSON, min_size=1, max_size=5) | st.text(max_size=3)},
    optional={
        "tools": st.lists(TOOL_VALUES | JSON, max_size=3) | JSON,
        "tool_choice": st.fixed_dictionaries({"type": st.just("function"), "name": JSON}) | JSON,
        "reasoning": st.fixed_dictionaries({"summary": JSON}) | JSON,
        "include": st.lists(JSON, max_size=2) | JSON,
        **dict.fromkeys(("instructions", "text", "store", "stream", "metadata", "top_p"), JSON),
    },
)


@given(BODIES)
@settings(max_examples=50, deadline=None)
def test_any_json_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        request = DIALECT.parse(body)
    except Refusal:
        return
    answer = DIALECT.form(body, request, name=NAME, created_s=5)
    assert json.loads(answer.whole(finished(ANSWERS["all"])))["status"] == "completed"
