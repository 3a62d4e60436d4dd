import msgspec
import pytest

from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.store.trees import tree_of, turn_tokens
from opengyre.trajectory.account import Reason
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import BrokenRecordError


def _record(spans: list[tuple[int, int, int]]) -> TokenRecord:
    header = TurnRecord(
        turn="e000001.t0",
        execution="e000001",
        attempt=0,
        parent="",
        fork_reason="",
        role="main",
        num_kept_tokens=0,
        num_new_prompt_tokens=2,
        num_completion_tokens=3,
        spans=[Span(start=s, end=e, policy_version=v, engine="c1#0") for s, e, v in spans],
        finish="stop",
        is_committed=True,
        ref=SegmentRef(segment=0, offset_bytes=0, crc32=0),
        received_s=0.0,
        first_token_s=0.1,
        ended_s=0.2,
        held_s=0.0,
        num_continuations=1,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=[5, 6],
        completion_ids=[7, 8, 9],
        logprobs=[-0.1, -0.2, -0.3],
        request_delta=b"",
    )


def test_each_token_of_a_continued_turn_keeps_the_version_that_sampled_it() -> None:
    turn = turn_tokens(_record([(0, 1, 3), (1, 3, 4)]))
    node = Tree().insert(turn)
    assert [(one.start, one.end, one.version) for one in node.spans] == [(0, 1, 3), (1, 3, 4)]


@pytest.mark.parametrize("spans", [[(0, 1, 3), (2, 3, 4)], [(1, 3, 3)], [(0, 2, 3), (1, 3, 4)]])
def test_spans_with_a_hole_or_an_overlap_are_refused_by_turn(
    spans: list[tuple[int, int, int]],
) -> None:
    with pytest.raises(BrokenRecordError, match=r"e000001\.t0"):
        tree_of([_record(spans)])


def test_spans_that_end_early_are_refused() -> None:
    with pytest.raises(BrokenRecordError, match="spans up to 2"):
        tree_of([_record([(0, 2, 3)])])


def test_a_word_that_is_not_known_is_refused_by_turn() -> None:
    record = _record([(0, 3, 3)])
    odd = msgspec.structs.replace(record.header, role="narrator")
    with pytest.raises(BrokenRecordError, match=r"e000001\.t0.*narrator"):
        tree_of([msgspec.structs.replace(record, header=odd)])


def test_tokens_of_launches_that_were_given_up_come_first_and_are_not_trained() -> None:
    record = _record([(0, 3, 3)])
    later = msgspec.structs.replace(record.header, turn="e000001.t1")
    tree = tree_of([msgspec.structs.replace(record, header=later)], given_up=[record])
    assert [tree.reason_of(node) for node in tree.nodes] == [Reason.RELAUNCHED, None]
