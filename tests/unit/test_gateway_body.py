"""Bodies as bytes: deltas that restore, digests that ignore order, strictness."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.gateway.body import body_delta, decode_object, digest, restore_body
from opengyre.gateway.request import Refusal


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_delta_restores_the_exact_bytes(body: bytes, parent: bytes) -> None:
    assert restore_body(body_delta(body, parent), parent) == body


@given(st.text("ab", max_size=20), st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_a_delta_restores_where_prefix_and_suffix_overlap(one: str, two: str, new: str) -> None:
    body, parent = (one + new + two).encode(), (one + two).encode()
    assert restore_body(body_delta(body, parent), parent) == body


def test_a_delta_of_an_appended_message_is_small() -> None:
    parent = json.dumps({"messages": ["x" * 50_000], "stream": True}).encode()
    body = json.dumps({"messages": ["x" * 50_000, "new"], "stream": True}).encode()
    assert len(body_delta(body, parent)) < 40


def test_digests_ignore_the_order_of_keys_and_nothing_else() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})


@pytest.mark.parametrize("body", [b"{", b'{"a": Infinity}', b'{"a": "\xc3"}', b"3", b"[" * 9999])
def test_what_is_not_a_strict_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        decode_object(body)


def test_only_lone_surrogates_are_replaced() -> None:
    body = rb'{"a": "\ud83d\ude00 \ud83d \\ud83d \udc00"}'
    assert decode_object(body) == {"a": "😀 � \\ud83d �"}
