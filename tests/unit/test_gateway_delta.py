"""Bodies as what they add to another one: exact, small, bounded."""

import json
import random
import sys
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.gateway.delta import body_delta, restore_body
from opengyre.seams.errors import BoundaryError


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_delta_restores_the_exact_bytes(body: bytes, parent: bytes) -> None:
    assert restore_body(body_delta(body, parent), parent) == body


@given(st.text("ab", max_size=20), st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_a_delta_restores_where_prefix_and_suffix_overlap(one: str, two: str, new: str) -> None:
    body, parent = (one + new + two).encode(), (one + two).encode()
    assert restore_body(body_delta(body, parent), parent) == body


@given(st.data())
def test_a_delta_restores_after_any_moves_and_changes(data: st.DataObject) -> None:
    parent = random.Random(1).randbytes(6_000)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(parent)), min_size=2, max_size=6)))
    parts = [parent[a:b] for a, b in zip([0, *cuts], [*cuts, len(parent)], strict=True)]
    kept = data.draw(st.lists(st.sampled_from(parts), max_size=8))
    news = data.draw(st.lists(st.binary(max_size=300), min_size=len(kept), max_size=len(kept)))
    body = b"".join(one + new for one, new in zip(kept, news, strict=True))
    assert restore_body(body_delta(body, parent), parent) == body


def _body(texts: list[str], **fields: object) -> bytes:
    """A request whose first field changes, whose newest message is marked, with tools behind."""
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in texts]
    messages[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}  # type: ignore[index]
    return json.dumps({**fields, "messages": messages, "tools": ["t" * 900]}).encode()


def _texts(seed: int, num: int, size: int) -> list[str]:
    source = random.Random(seed)
    return [source.randbytes(size // 2).hex() for _ in range(num)]


def test_a_delta_costs_what_is_new_when_head_middle_and_end_change() -> None:
    texts = _texts(1, 20, 4_000)
    parent = _body(texts[:19], metadata="session one")
    body = _body(texts, metadata="session two is longer")
    delta = body_delta(body, parent)
    assert restore_body(delta, parent) == body
    assert len(delta) < 4_000 / 2 + 400


def test_reordered_and_edited_messages_cost_little() -> None:
    texts = _texts(2, 30, 3_000)
    parent = _body(texts)
    edited = [text.replace("7", "8", 1) for text in texts]
    body = _body([*edited[10:20], *edited[:10], *edited[20:]])
    delta = body_delta(body, parent)
    assert restore_body(delta, parent) == body
    assert len(delta) < 8_000


def test_no_body_makes_the_search_for_runs_long() -> None:
    """Thousands of short runs among new text: what is not found in time is only not shared."""
    source = random.Random(5)
    parent = source.randbytes(1_500_000)
    pieces = [parent[at : at + 300] for at in range(0, len(parent), 300)]
    body = b"".join(piece + source.randbytes(900) for piece in pieces)
    num_searches = 0

    def count(frame: object, event: str, what: Any) -> None:
        nonlocal num_searches
        num_searches += event == "c_call" and what.__name__ == "find"

    sys.setprofile(count)
    delta = body_delta(body, parent)
    sys.setprofile(None)
    assert restore_body(delta, parent) == body
    assert 500 < num_searches < 2_000


def test_a_delta_of_an_appended_message_is_small() -> None:
    parent = json.dumps({"messages": ["x" * 50_000], "stream": True}).encode()
    body = json.dumps({"messages": ["x" * 50_000, "new"], "stream": True}).encode()
    assert len(body_delta(body, parent)) < 60


@pytest.mark.parametrize("size", [3, 3_000], ids=["short rest", "long rest"])
def test_a_delta_of_another_format_parent_or_with_damage_is_refused(size: int) -> None:
    parent = random.Random(3).randbytes(2_000)
    delta = body_delta(parent[:900] + random.Random(4).randbytes(size) + parent[900:], parent)
    damaged = [delta[:-3], delta[:3], delta[:-3] + b"\0" + delta[-2:]]
    damaged.append(delta[:1] + b"\xff\xff\xff\xff" + delta[5:])
    for wrong in (b"\x07" + delta[1:], b"", *damaged):
        with pytest.raises(BoundaryError, match="cannot be restored"):
            restore_body(wrong, parent)
    with pytest.raises(BoundaryError, match="another parent"):
        restore_body(delta, parent[:1000])


def test_what_unpacks_to_more_than_a_short_rest_is_refused() -> None:
    bomb = b"\x02" + bytes(4) + zlib.compress(bytes(5_000))
    with pytest.raises(BoundaryError, match="does not end"):
        restore_body(bomb, b"")
