import msgspec
import pytest

from opengyre.seams.cells import MicroStep, StepCounts
from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.trainer.wire import add_counts, execution_share, micro_step, turn_tokens
from opengyre.trajectory.groups import Row
from opengyre.trajectory.rows import BrokenRecordError, Path, paths_of


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
    assert turn.versions == [3, 4, 4]
    (path,), account = paths_of([turn])
    assert path.versions == [0, 0, 3, 4, 4]
    assert account.trained == 3


@pytest.mark.parametrize("spans", [[(0, 1, 3), (2, 3, 4)], [(1, 3, 3)], [(0, 2, 3), (1, 3, 4)]])
def test_spans_with_a_hole_or_an_overlap_are_refused_by_turn(
    spans: list[tuple[int, int, int]],
) -> None:
    with pytest.raises(BrokenRecordError, match=r"e000001\.t0"):
        turn_tokens(_record(spans))


def test_spans_that_end_early_are_refused() -> None:
    with pytest.raises(BrokenRecordError, match="lengths"):
        paths_of([turn_tokens(_record([(0, 2, 3)]))])


def test_a_micro_step_survives_the_wire_and_knows_its_share_of_executions() -> None:
    path = Path(
        turns=("t",), token_ids=[1, 2, 3], mask=[0, 1, 1], logprobs=[0, -1, -2], versions=[0, 1, 1]
    )
    row = Row(
        group="g",
        execution="e",
        path=path,
        advantage=0.25,
        num_path_tokens=2,
        num_execution_tokens=8,
        is_counted_only=False,
    )
    made = micro_step([row, row], step=3, number=7, version=2)
    assert execution_share(made) == 0.5
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=MicroStep) == made


def test_counts_add_like_gradients() -> None:
    one = StepCounts(num_executions=0.5, num_tokens=3, loss_sum=1.0, micro_steps=[1])
    two = StepCounts(num_executions=1.5, num_tokens=4, num_clipped=2, micro_steps=[0, 2])
    assert add_counts(one, two) == StepCounts(
        num_executions=2.0, num_tokens=7, loss_sum=1.0, num_clipped=2, micro_steps=[1, 0, 2]
    )
