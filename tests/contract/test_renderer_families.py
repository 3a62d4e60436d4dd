"""Each family of the table keeps the gateway's promises, with its own renderer as the reference."""

import json
import re
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from families_under_test import NAMES, family_of, reference_of, renderer_of, tokenizer_of
from family_answers import SYSTEM, TOOLS, USER, Said, completion, fitted, ids_of, text_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from opengyre.gateway.rendering.families import Stream
from opengyre.gateway.rendering.output import AnswerParser
from opengyre.gateway.request import (
    Call,
    CallEnd,
    CallPiece,
    CallStart,
    Message,
    ReasoningPiece,
    Refusal,
    Role,
    TextPiece,
)

WORDS = st.text(alphabet='ab é😀"\\{}:,\n', min_size=1, max_size=12).map(lambda t: f"w{t}w")
ARGUMENTS = st.fixed_dictionaries(
    {"command": WORDS},
    optional={
        "count": st.integers(-9, 10**20) | st.sampled_from([5000.0, 1.5, 1e30]),
        "more": st.dictionaries(st.sampled_from(["x", "y"]), WORDS | st.none(), max_size=2),
    },
)
EACH = pytest.mark.parametrize("name", NAMES)
SOME = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


SAID = st.builds(
    Said,
    reasoning=WORDS,
    text=WORDS,
    calls=st.lists(st.tuples(st.sampled_from(["bash", "edit_file"]), ARGUMENTS), max_size=2).map(
        tuple
    ),
)


def parser(name: str, **more: Any) -> AnswerParser:
    return renderer_of(name).parser(
        stops=(), call_id=lambda index: f"call_{index}", tools=TOOLS, **more
    )


def parsed(name: str, ids: list[int], **more: Any) -> Message:
    """The answer of `ids`; its pieces must add up to it."""
    one = parser(name, **more)
    pieces: list[Any] = []
    for token in ids:
        pieces += one.feed(token)
    pieces += one.finish()
    message = one.message()
    assert "".join(p.text for p in pieces if isinstance(p, TextPiece)) == message.text
    thoughts = "".join(p.text for p in pieces if isinstance(p, ReasoningPiece))
    assert thoughts == (message.reasoning or "")
    for index, call in enumerate(message.calls):
        mine = [p for p in pieces if isinstance(p, CallStart | CallPiece | CallEnd)]
        start, *parts, end = [p for p in mine if p.index == index]
        assert start == CallStart(index=index, call_id=call.call_id, name=call.name)
        assert "".join(part.text for part in parts) == call.arguments
        assert end == CallEnd(index=index, call=call)
    return message


def results(message: Message) -> list[Message]:
    return [
        Message(role=Role.TOOL, text=f"result {k}", call_id=call.call_id)
        for k, call in enumerate(message.calls)
    ]


@EACH
@SOME
@given(said=SAID)
def test_an_answer_is_parsed_as_its_own_renderer_parses_it(name: str, said: Said) -> None:
    said = fitted(name, said)
    ids = completion(name, said)
    prompt = renderer_of(name).root([SYSTEM, USER], TOOLS)
    message = parsed(name, ids)
    reference = reference_of(name).parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    assert message.text.strip() == (reference.content or "").strip() == said.text.strip()
    assert (message.reasoning or "").strip() == (reference.reasoning_content or "").strip()
    ours = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert ours == [(call.name, call.arguments) for call in reference.tool_calls]
    assert [name for name, _ in ours] == [name for name, _ in said.calls]
    if family_of(name).reasoning is not None:
        assert message.reasoning == said.reasoning.strip()


@EACH
@SOME
@given(said=SAID)
def test_an_answer_does_not_depend_on_how_its_ids_were_split(name: str, said: Said) -> None:
    ids = completion(name, fitted(name, said))
    table = [renderer_of(name).token_bytes(token) for token in range(1024)]
    by_byte = {data[0]: number for number, data in enumerate(table) if len(data) == 1}
    markers = tokenizer_of(name).get_added_tokens_decoder()
    slow: list[int] = []
    for token in ids:
        data = renderer_of(name).token_bytes(token)
        slow += [token] if token in markers else [by_byte[byte] for byte in data]
    assert parsed(name, slow) == parsed(name, ids)


@EACH
@pytest.mark.parametrize(
    "text", ["    indented\n", "\n\nx\n\n", " ", "", "5000.0", "null", "<a>&</a>"]
)
def test_a_text_argument_keeps_every_character(name: str, text: str) -> None:
    said = fitted(name, Said(calls=(("edit_file", {"command": text, "count": 5000.0}),)))
    ids = completion(name, said)
    (call,) = parsed(name, ids).calls
    assert json.loads(call.arguments) == {"command": text, "count": 5000.0}
    assert "5000.0" in call.arguments


@EACH
@SOME
@given(data=st.data())
def test_no_ids_break_a_parser_and_all_it_gives_adds_up(name: str, data: st.DataObject) -> None:
    markers = sorted(tokenizer_of(name).get_added_tokens_decoder())
    whole = completion(name, fitted(name, Said(calls=(("bash", {"command": "ls"}),))))[:-1]
    parts = st.sampled_from([*([marker] for marker in markers), ids_of(name, " w{\n"), whole])
    ids = [token for part in data.draw(st.lists(parts, max_size=12)) for token in part]
    for is_parallel in (True, False):
        message = parsed(name, ids, is_parallel=is_parallel)
        at_once = parser(name, is_parallel=is_parallel)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)))
        for begin, end in pairwise([0, *cuts, len(ids)]):
            _, num = at_once.feed_all(ids[begin:end])
            assert num == end - begin or at_once.is_stopped
        at_once.finish()
        assert at_once.message() == message
        assert is_parallel or len(message.calls) <= 1


@EACH
@SOME
@given(turns=st.lists(SAID, min_size=1, max_size=3))
def test_each_turn_begins_with_exactly_what_came_before(name: str, turns: list[Said]) -> None:
    renderer, reference = renderer_of(name), reference_of(name)
    prompt = renderer.root([SYSTEM, USER], TOOLS)
    assert prompt == renderer.root([SYSTEM, USER], TOOLS)
    for said in turns:
        said = fitted(name, said)
        if name == "deepseek-v4":
            said = Said(reasoning=said.reasoning, text=said.text, calls=said.calls[:1])
        ids = completion(name, said)
        message = parsed(name, ids)
        new = results(message) or [Message(role=Role.USER, text="And now?")]
        longer = renderer.extend(prompt, ids, new, tools=TOOLS, calls=message.calls)
        assert longer is not None
        assert longer[: len(prompt) + len(ids)] == prompt + ids
        added = text_of(name, longer[len(prompt) + len(ids) :])
        assert all(each.text in added for each in new)
        probe = ids_of(name, "x")
        if name != "deepseek-r1":  # it looks for the role's marker, which results do not have
            after = reference.parse_response(probe, prompt_ids=longer)
            assert bool(after.content) is bool(parsed(name, probe).text)
        prompt = longer


@EACH
@SOME
@given(said=SAID)
def test_the_end_of_a_prompt_is_all_that_extending_it_needs(name: str, said: Said) -> None:
    ids = completion(name, fitted(name, said))
    first = renderer_of(name).root([SYSTEM, USER], TOOLS)
    user = Message(role=Role.USER, text="And now?")
    second = renderer_of(name).extend(first, completion(name, Said()), [user], tools=TOOLS)
    assert second is not None
    chat = [{"role": "user", "content": "Go on."}]
    whole = reference_of(name).bridge_to_next_turn(second, ids, chat, tools=TOOLS)
    ours = renderer_of(name).extend(
        second, ids, [Message(role=Role.USER, text="Go on.")], tools=TOOLS
    )
    assert ours == (None if whole is None else whole.token_ids)


@EACH
@SOME
@given(said=SAID, data=st.data())
def test_a_cut_answer_is_closed_in_the_next_prompt(
    name: str, said: Said, data: st.DataObject
) -> None:
    ids = completion(name, fitted(name, said))
    cut = ids[: data.draw(st.integers(1, len(ids) - 1))]
    parsed(name, cut)
    prompt = renderer_of(name).root([SYSTEM, USER], TOOLS)
    longer = renderer_of(name).extend(prompt, cut, [Message(role=Role.USER, text="Go on.")])
    assert longer is not None
    assert longer[: len(prompt) + len(cut)] == prompt + cut
    assert "Go on." in text_of(name, longer[len(prompt) + len(cut) :])


@EACH
def test_any_conversation_is_rendered_or_refused(name: str) -> None:
    call = Call(call_id="call_0", name="bash", arguments='{"command": "ls')
    said = Message(role=Role.ASSISTANT, text="t", reasoning="r", calls=(call,))
    result = Message(role=Role.TOOL, text="ok", call_id="call_0")
    late = Message(role=Role.SYSTEM, text="late words")
    root = renderer_of(name).root([SYSTEM, late, USER, late], TOOLS)
    assert "late words" in text_of(name, root)
    text = text_of(name, renderer_of(name).root([USER, said, result, USER], TOOLS))
    assert '"ls' in text.replace("\\", "")
    assert "ok" in text
    two = Message(role=Role.ASSISTANT, calls=(call, structs.replace(call, call_id="call_1")))
    if name == "llama-3":
        with pytest.raises(Refusal, match="single tool"):
            renderer_of(name).root([USER, two, result], TOOLS)
    else:
        renderer_of(name).root([USER, two, result], TOOLS)


@EACH
@pytest.mark.parametrize(
    "parameters",
    [None, 1, [], {"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#/x/y"}}}],
)
def test_odd_schemas_are_rendered_or_refused_and_never_break_a_parser(
    name: str, parameters: Any
) -> None:
    odd: list[Any] = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
    with suppress(Refusal):
        assert renderer_of(name).root([USER], odd)
    one = renderer_of(name).parser(stops=(), call_id=str, tools=odd)
    for token in completion(name, fitted(name, Said(calls=(("bash", {"command": "ls"}),)))):
        one.feed(token)
    one.finish()
    assert len(one.message().calls) <= 1


@EACH
def test_results_are_told_by_what_the_model_called_its_calls(name: str) -> None:
    """With calls that only their order tells from those of the conversation before."""
    said = Said(text="", calls=(("edit_file", {"command": "ls"}),))
    ids = completion(name, said)
    message = parsed(name, ids)
    prompt = renderer_of(name).root([USER], TOOLS)
    added = renderer_of(name).extension(prompt, ids, results(message), calls=message.calls)
    assert added is not None
    is_named = name in ("kimi-k2", "kimi-k2.5", "gemma4", "inkling")
    assert ("edit_file" in text_of(name, added)) is is_named
    assert ("functions.edit_file:0" in text_of(name, added)) is family_of(name).has_call_ids
    assert "call_0" not in text_of(name, added)


@EACH
def test_only_the_first_call_is_taken_when_one_is_wanted(name: str) -> None:
    two = Said(calls=(("bash", {"command": "a"}), ("edit_file", {"command": "b"})))
    one = parser(name, is_parallel=False)
    for token in completion(name, fitted(name, two)):
        one.feed(token)
    one.finish()
    assert [call.name for call in one.message().calls] == ["bash"]
    assert one.is_stopped


@EACH
@pytest.mark.parametrize("tool", [None, "bash"])
def test_a_call_can_be_forced_where_the_table_says_so(name: str, tool: str | None) -> None:
    family, renderer = family_of(name), renderer_of(name)
    forced = renderer.forced_prefix(tool)
    can = family.call is not None if tool is None else family.named_call is not None
    assert (forced is not None) is can
    if forced is None:
        return
    said = Said(text="", calls=(("bash", {"command": "ls"}),))
    text = text_of(name, completion(name, said))
    prefix = text_of(name, forced)
    if family.reasoning is not None:
        prefix = prefix.removeprefix(family.reasoning[1])
    head = r"\s*".join(re.escape(part) for part in re.split(r"(?<=>)|\s+", prefix) if part)
    found = re.search(head, text)
    assert found is not None
    rest = text[found.end() :]
    message = parsed(name, ids_of(name, rest), forced=forced)
    assert [(c.name, json.loads(c.arguments)) for c in message.calls] == list(said.calls)
    assert message.text == ""
    prompt = [*renderer.root([USER], TOOLS), *forced]
    added = renderer.extension(prompt, ids_of(name, rest), results(message), calls=message.calls)
    assert added is not None
    assert "result 0" in text_of(name, added)


def test_two_results_at_once_are_rendered_anew_where_their_order_is_the_calls_order() -> None:
    two = Said(calls=(("bash", {"command": "a"}), ("edit_file", {"command": "b"})))
    ids = completion("deepseek-v4", two)
    message = parsed("deepseek-v4", ids)
    prompt = renderer_of("deepseek-v4").root([USER], TOOLS)
    assert renderer_of("deepseek-v4").extend(prompt, ids, results(message)) is None


@EACH
def test_arguments_that_are_json_come_while_they_are_sampled(name: str) -> None:
    family = family_of(name)
    said = Said(text="", calls=(("bash", {"command": "w " * 40 + "w"}),))
    one, num_parts = parser(name), 0
    for token in completion(name, said):
        num_parts += sum(isinstance(piece, CallPiece) for piece in one.feed(token))
    assert (num_parts > 10) is (family.stream is Stream.ARGUMENTS)
    assert json.loads(one.message().calls[0].arguments) == said.calls[0][1]
