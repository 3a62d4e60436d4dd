"""What is answered in Anthropic's form comes back as the same neutral message."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.gateway.body import decode_object
from opengyre.gateway.dialects.anthropic import DIALECT
from opengyre.gateway.history import Keys
from opengyre.gateway.request import (
    Answer,
    Call,
    Ending,
    Message,
    Piece,
    ReasoningPiece,
    Role,
    TextPiece,
)
from tests.unit.anthropic_desk import USAGE, USER, call_pieces, events, form, messages

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(), JSON, max_size=4).map(lambda value: json.dumps(value, indent=1)),
    JSON.filter(lambda value: value is not None).map(json.dumps),
    st.text(),
    st.sampled_from(['{"a": "\\ud83d"}', '{"a": 5e3}', '{"a":1,"a":2}', "{", '{"a": NaN}']),
)
WORDS = st.text(min_size=1, max_size=12)


PARTS = st.lists(
    st.tuples(st.just("text"), WORDS) | st.tuples(st.just("call"), ARGUMENTS), max_size=5
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[Message, list[Piece]]:
    """A message and its pieces: reasoning, then text and calls in any order."""
    thoughts = draw(st.lists(WORDS, max_size=3))
    pieces: list[Piece] = [ReasoningPiece(text=text) for text in thoughts]
    shown = ""
    calls: list[Call] = []
    for kind, text in draw(PARTS):
        if kind == "text":
            shown += text
            pieces.append(TextPiece(text=text))
            continue
        calls.append(Call(call_id=f"call_{len(calls)}", name="bash", arguments=text))
        pieces += call_pieces(len(calls) - 1, text)
    reasoning = "".join(thoughts)
    told = Message(role=Role.ASSISTANT, text=shown, reasoning=reasoning or None, calls=tuple(calls))
    return told, pieces


def folded(data: bytes) -> list[dict[str, Any]]:
    """The blocks of a stream; every index must be that of the one block that is open."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events(data):
        match event["type"].removeprefix("content_block_"):
            case "start":
                assert (event["index"], is_open) == (len(blocks), False)
                blocks.append({**event["content_block"]})
                blocks[-1].update({"input": ""} if "input" in blocks[-1] else {})
                is_open = True
            case "delta":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                added = {
                    key.replace("partial_json", "input"): v for key, v in event["delta"].items()
                }
                added.pop("type")
                blocks[-1].update({key: blocks[-1][key] + value for key, value in added.items()})
            case "stop":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                is_open = False
    assert not is_open
    return blocks


def as_input(raw: str) -> Any:
    """As Claude Code reads streamed arguments."""

    def no_number(text: str) -> Any:
        raise ValueError(text)

    try:
        return json.loads(raw or "{}", parse_constant=no_number)
    except ValueError:
        return {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}


@settings(max_examples=40)
@given(answers(), st.sampled_from(["summarized", "omitted"]))
def test_what_was_answered_comes_back_as_the_same_message(
    made: tuple[Message, list[Piece]], display: str
) -> None:
    told, pieces = made
    config = {"type": "adaptive", "display": display}
    stream = form(thinking=config)
    data = b"".join(stream.delta([piece]) for piece in pieces)
    done = Answer(message=told, ending=Ending.STOP, usage=USAGE)
    blocks = folded(data + stream.closing(done))
    for block in blocks:
        block.update({"input": as_input(block["input"])} if "input" in block else {})
    whole = json.loads(form(thinking=config).whole(done))["content"]
    for sent in (blocks, whole):
        said = {"role": "assistant", "content": sent}
        body = decode_object(json.dumps({"messages": [USER, said, USER]}).encode())
        back = DIALECT.parse(body).messages[1]
        assert back.reasoning == told.reasoning
        assert Keys(()).is_same_message(back, told)


INPUTS = st.dictionaries(st.text(), JSON, max_size=3)
TOLD = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=6)}),
    st.fixed_dictionaries(
        {
            "type": st.just("tool_result"),
            "tool_use_id": st.just("c"),
            "content": st.text(max_size=6),
        }
    ),
)
SAID = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=6)}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": st.just("c"), "name": st.just("b"), "input": INPUTS}
    ),
)
TURN = st.tuples(st.just("user"), st.lists(TOLD, min_size=1, max_size=3)) | st.tuples(
    st.just("assistant"), st.lists(SAID, min_size=1, max_size=3)
)


@st.composite
def rewritten(draw: st.DrawFn, turns: list[tuple[str, list[dict[str, Any]]]]) -> list[Any]:
    """The same messages as another harness, or the same one later, would write them."""
    told: list[Any] = []
    for role, blocks in turns:
        written = [draw(way_of(block)) for block in blocks]
        cut = draw(st.integers(0, len(written)))
        parts = [part for part in (written[:cut], written[cut:]) if part]
        told += [{"role": role, "content": draw(content_of(part))} for part in parts]
    return told


@st.composite
def way_of(draw: st.DrawFn, block: dict[str, Any]) -> dict[str, Any]:
    """Another order of keys, a cache mark, an absent or null field, a result in blocks."""
    found = dict(block)
    for name in ("text", "content", "input"):
        if found.get(name) in ("", {}) and draw(st.booleans()):
            found[name] = None
    if isinstance(found.get("content"), str) and draw(st.booleans()):
        found["content"] = [{"type": "text", "text": found["content"]}, {"type": "text"}]
    if isinstance(found.get("input"), dict):
        found["input"] = dict(draw(st.permutations(list(found["input"].items()))))
    if found["type"] == "tool_result":
        found["is_error"] = draw(st.sampled_from([False, None]))
    if draw(st.booleans()):
        found["cache_control"] = {"type": "ephemeral"}
    return dict(draw(st.permutations(list(found.items()))))


def content_of(blocks: list[dict[str, Any]]) -> st.SearchStrategy[Any]:
    """Blocks, or the string that stands for one of text."""
    (first, *others) = blocks
    if others or first["type"] != "text":
        return st.just(blocks)
    return st.sampled_from([blocks, first["text"], [*blocks, {"type": "text", "text": ""}]])


@settings(max_examples=30)
@given(st.lists(TURN, min_size=1, max_size=4), st.data())
def test_the_same_conversation_written_otherwise_gives_equal_messages(
    turns: list[tuple[str, list[dict[str, Any]]]], data: st.DataObject
) -> None:
    plain = [{"role": role, "content": blocks} for role, blocks in turns]
    other = data.draw(rewritten(turns))
    assert messages(*other, USER) == messages(*plain, USER)
