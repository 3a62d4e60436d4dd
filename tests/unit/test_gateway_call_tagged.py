"""Calls whose arguments stand between tags, as JSON while they are written."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.gateway.rendering.call_tagged import TaggedCall, read_tagged
from opengyre.gateway.rendering.families import FAMILIES, Tags

PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": ["string", "null"]},
    "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": {"properties": PROPERTIES}}}
]
TEXTS = st.text(alphabet='a\n <>/"\\é&=pr', max_size=12)


def tags_of(name: str) -> Tags:
    tags = next(family.arguments for family in FAMILIES if family.name == name)
    assert isinstance(tags, Tags)
    return tags


FUNCTION, INVOKE, KEYS = tags_of("qwen3.5"), tags_of("minimax-m2"), tags_of("glm-5")


def written(members: dict[str, str]) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in members.items()]
    return "\n<function=edit>\n" + "".join(parts) + "</function>\n"


def read(block: str, *, cuts: list[int] | None = None, is_whole: bool = True) -> tuple[str, str]:
    call, arguments = TaggedCall(FUNCTION, TOOLS), ""
    for begin, end in pairwise([0, *sorted(cuts or []), len(block)]):
        arguments += call.feed(block[begin:end])
    return call.name, arguments + call.close(is_whole=is_whole)


def value_of(key: str, text: str) -> Any:
    return json.loads(read(written({key: text}))[1])[key]


@given(st.dictionaries(st.sampled_from(["text", "more"]), TEXTS), st.data())
def test_texts_keep_every_character_however_the_block_is_split(
    members: dict[str, str], data: st.DataObject
) -> None:
    members = {key: f"x{value}x" for key, value in members.items()} | {
        "text": members.get("text", "")
    }
    block = written(members)
    cuts = data.draw(st.lists(st.integers(0, len(block)), max_size=8))
    name, arguments = read(block, cuts=cuts)
    assert name == "edit"
    assert json.loads(arguments) == members


@given(TEXTS, st.data())
def test_a_call_that_was_cut_is_no_json_so_that_nobody_runs_it(
    text: str, data: st.DataObject
) -> None:
    block = written({"text": text, "number": "5"})
    end = data.draw(st.integers(block.index(">") + 1, len(block)))
    _, arguments = read(block[:end], is_whole=False)
    with pytest.raises(ValueError, match=r"."):
        json.loads(arguments)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5000.0", "5000.0"),
        ("number", " 5000.0 ", 5000.0),
        ("flag", "True", True),
        ("flag", "false", False),
        ("either", "null", None),
        ("either", "None", None),
        ("either", " words ", " words "),
        ("either", "5", "5"),
        ("list", "null", None),
        ("list", "[1]", "[1]"),
        ("any", "5", 5),
        ("unknown", "[1, {}]", [1, {}]),
        ("unknown", "True", "True"),
        ("number", "NaN", "NaN"),
        ("number", "1e", "1e"),
    ],
)
def test_a_value_is_what_its_schema_says_or_what_it_can_be_read_as(
    key: str, text: str, value: object
) -> None:
    assert value_of(key, text) == value


def test_numbers_stay_as_they_were_written() -> None:
    assert read(written({"number": "5000.00"})) == ("edit", '{"number": 5000.00}')
    assert read("<function=edit>\n</function>") == ("edit", "{}")


def test_texts_come_while_they_are_sampled() -> None:
    call = TaggedCall(FUNCTION, TOOLS)
    assert call.feed("<function=edit>\n<parameter=text>\n  ab\n</para") == '{"text": "  ab'
    assert call.feed("graph>") == "\\n</paragraph>"
    assert call.feed("\n</parameter>") == '"'


def test_a_value_that_is_never_closed_stays_open() -> None:
    assert read("<function=edit><parameter=text>\nab") == ("edit", '{"text": "ab')
    assert read("<function=edit><parameter=number>\n12") == ("edit", '{"number": 12')


@pytest.mark.parametrize("block", ["", "bash", "<function=>", "<parameter=text>x</parameter>"])
def test_a_block_without_a_head_is_no_call(block: str) -> None:
    assert read(block) == ("", "")


def test_keys_may_stand_in_tags_of_their_own() -> None:
    block = (
        "edit\n<arg_key>text</arg_key>\n<arg_value> <b>\n</arg_value>\n<arg_key>number</arg_key>"
    )
    call = TaggedCall(KEYS, TOOLS)
    arguments = "".join(map(call.feed, block)) + call.feed("<arg_value>5</arg_value>")
    assert arguments + call.close(is_whole=True) == '{"text": " <b>\\n", "number": 5}'


def test_a_block_may_hold_several_calls() -> None:
    one = '<invoke name="edit"><parameter name="text"> x </parameter></invoke>'
    block = f"\n{one}\n{one}\n"
    assert read_tagged(block, INVOKE, TOOLS) == [("edit", '{"text": " x "}')] * 2
    assert read_tagged(block + one[:-12], INVOKE, TOOLS)[2] == ("edit", '{"text": " x </paramet')
