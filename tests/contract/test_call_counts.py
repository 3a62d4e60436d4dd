"""Calls of each family's answers: read, malformed, or cut through no fault of the model's."""

import pytest
from families_under_test import NAMES, family_of, renderer_of, tokenizer_of
from family_answers import TOOLS, Said, completion, fitted, ids_of, text_of

from opengyre.gateway.call_counts import CallCounts, count_calls
from opengyre.gateway.rendering.output import AnswerParser

EACH = pytest.mark.parametrize("name", NAMES)
ONE_CALL = Said(calls=(("bash", {"command": "ls"}),))


def counted(name: str, ids: list[int], *, is_cut: bool) -> CallCounts:
    return count_calls(parsed(name, ids).begun, is_cut=is_cut, watched=None)


def parsed(name: str, ids: list[int]) -> AnswerParser:
    one = renderer_of(name).parser(stops=(), call_id=str, tools=TOOLS)
    one.feed_all(ids)
    one.finish()
    return one


def has_begun(name: str, ids: list[int]) -> bool:
    """Its call's beginning is among `ids`."""
    family = family_of(name)
    if family.call is not None:
        return tokenizer_of(name).token_to_id(family.call[0]) in ids
    return ('"name"' if family.is_opener_first else family.opener) in text_of(name, ids)


@EACH
def test_calls_that_can_be_read_are_counted_and_nothing_is_malformed(name: str) -> None:
    two = Said(calls=(("bash", {"command": "ls"}), ("edit_file", {"command": "x", "count": 2})))
    said = fitted(name, two)
    found = counted(name, completion(name, said), is_cut=False)
    assert found == CallCounts(num_read=len(said.calls), num_malformed=0, num_watched=0)
    found = counted(name, completion(name, Said()), is_cut=False)
    assert found == CallCounts(num_read=0, num_malformed=0, num_watched=0)


@EACH
def test_a_call_that_the_model_left_open_is_malformed_and_one_that_was_cut_is_not(
    name: str,
) -> None:
    ids = completion(name, fitted(name, ONE_CALL))
    seen = set()
    for end in range(1, len(ids)):
        ended = counted(name, ids[:end], is_cut=False)
        cut = counted(name, ids[:end], is_cut=True)
        assert ended.num_read + ended.num_malformed == has_begun(name, ids[:end])
        assert (cut.num_read, cut.num_malformed) == (ended.num_read, 0)
        seen.add((ended.num_read, ended.num_malformed))
    assert (0, 1) in seen


@EACH
def test_an_empty_call_is_malformed_also_where_the_answer_is_cut_later(name: str) -> None:
    family = family_of(name)
    if family.call is None:
        pytest.skip("its calls end with the answer")
    ids = completion(name, fitted(name, ONE_CALL))
    begin = ids.index(ids_of(name, family.call[0])[0])
    broken = [*ids[: begin + 1], *ids_of(name, family.call[1])]
    for is_cut in (False, True):
        found = counted(name, broken, is_cut=is_cut)
        assert (found.num_read, found.num_malformed) == (0, 1)
