"""Bodies as bytes: digests that ignore order, strictness."""

import pytest

from opengyre.gateway.body import decode_object, digest
from opengyre.gateway.request import Refusal


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
