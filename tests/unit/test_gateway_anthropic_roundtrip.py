"""What is answered in Anthropic's form comes back as the same neutral message."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.gateway.body import decode_object
from opengyre.gateway.dialects.anthropic import DIALECT
from opengyre.gateway.history import is_same_call
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
from tests.unit.anthropic_desk import USAGE, USER, call_pieces, events, form

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


def is_same(one: Message, other: Message) -> bool:
    """Equal, with arguments as values."""
    if len(one.calls) != len(other.calls) or (one.text, one.reasoning) != (
        other.text,
        other.reasoning,
    ):
        return False
    return all(is_same_call(a, b) for a, b in zip(one.calls, other.calls, strict=True))


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
        assert is_same(back, told)
