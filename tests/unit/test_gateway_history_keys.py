"""Which histories are equal: values of tool arguments, whatever their writing."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.gateway.history import Keys
from opengyre.gateway.request import Call, Message, Role

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def call(arguments: str, call_id: str = "") -> Call:
    return Call(call_id=call_id, name="bash", arguments=arguments)


def key(arguments: str, call_id: str = "") -> bytes:
    calls = (call(arguments, call_id),)
    return Keys(()).next(b"", Message(role=Role.ASSISTANT, calls=calls))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"b": 2, "a": [1, {"d": 4, "c": 3}]}', '{"a":[1,{"c":3,"d":4}],"b":2}'),
        ('{"n": 5000.0}', '{"n": 5e3}'),
        ('{"n": 5000.00}', '{"n":5000}'),
        ('{"n": 1.50}', '{"n": 1.5}'),
        ('{"n": -0.0}', '{"n": 0}'),
        ('{"n": 1e20}', '{"n": 100000000000000000000}'),
        (r'{"s": "\u00e9\n"}', '{"s": "é\\n"}'),
        (r'{"s": "half \ud83d"}', '{"s": "half \ufffd"}'),
        ("", "{}"),
    ],
)
def test_arguments_of_one_value_give_one_key(one: str, other: str) -> None:
    assert key(one, "call_1") == key(other, "call_2")
    assert Keys(()).is_same_call(call(one), call(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"n": 1}', '{"n": "1"}'),
        ('{"n": 1}', '{"n": true}'),
        ('{"n": NaN}', '{"n": null}'),
        ('{"n": 1e999}', '{"n": null}'),
        ('{"n": 9007199254740993}', '{"n": 9007199254740992}'),
        ('{"n": 36893488147419103232}', '{"n": "36893488147419103232"}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1', '{"a": 1 '),
        ('{"a": 1}', '"{\\"a\\": 1}"'),
    ],
)
def test_arguments_of_different_values_give_different_keys(one: str, other: str) -> None:
    assert key(one) != key(other)
    assert not Keys(()).is_same_call(call(one), call(other))


@pytest.mark.parametrize("text", ["[" * 50_000, "1" * 6_000, "\x00", "{"])
def test_arguments_that_are_no_strict_json_are_equal_to_themselves(text: str) -> None:
    assert key(text) == key(text) != key(text + " ")


@given(_JSON)
def test_any_value_keeps_its_key_through_a_harness_that_writes_it_anew(value: object) -> None:
    written = json.dumps(value, ensure_ascii=False, indent=1)
    again = json.dumps(json.loads(written), sort_keys=True, separators=(",", ":"))
    assert key(written) == key(again)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_equals_itself_as_javascript_writes_it(number: float) -> None:
    is_whole = number == math.floor(number) and abs(number) < 1e21
    assert key(f'{{"n": {number!r}}}') == key(f'{{"n": {int(number) if is_whole else number}}}')


def test_ids_and_reasoning_are_not_in_a_key() -> None:
    plain = Message(role=Role.ASSISTANT, text="a", calls=(call("{}"),))
    other = Message(role=Role.ASSISTANT, text="a", calls=(call("{}", "x"),), reasoning="why")
    assert Keys(()).next(b"k", plain) == Keys(()).next(b"k", other)
    result = Message(role=Role.TOOL, text="r", call_id="call_1")
    again = Message(role=Role.TOOL, text="r", call_id="x")
    assert Keys(()).all([plain, result]) == Keys(()).all([other, again])


def test_a_default_of_the_tools_schema_may_be_there_or_not() -> None:
    members = {"all": {"type": "boolean", "default": False}, "at": {"type": "string"}}
    schema = {"type": "object", "properties": members}
    keys = Keys([{"type": "function", "function": {"name": "bash", "parameters": schema}}])
    plain, filled = call('{"at": "x"}'), call('{"all": false, "at": "x"}')
    assert keys.is_same_call(plain, filled)
    assert not keys.is_same_call(plain, call('{"all": true, "at": "x"}'))
    assert not Keys(()).is_same_call(plain, filled)


def test_roles_texts_and_what_comes_before_are_in_a_key() -> None:
    user = Message(role=Role.USER, text="a")
    variants = [
        Keys(()).next(b"k", user),
        Keys(()).next(b"l", user),
        Keys(()).next(b"k", Message(role=Role.SYSTEM, text="a")),
        Keys(()).next(b"k", Message(role=Role.USER, text="a ")),
    ]
    assert len(set(variants)) == len(variants)
