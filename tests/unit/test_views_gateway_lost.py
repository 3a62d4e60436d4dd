"""What a gateway's death leaves in the journal: calls that no turn will ever tell of."""

from opengyre.seams.records import SegmentRef, TurnRecord
from opengyre.store import observations as seen
from opengyre.store.codec import JournalValue
from opengyre.store.journal import Row
from opengyre.views.fold import fold
from opengyre.views.notes import notes_of
from opengyre.views.summary import summarise


def continued(turn: str) -> seen.Continued:
    return seen.Continued(
        execution=turn.partition(".")[0],
        turn=turn,
        from_engine="c0",
        to_engine="s0",
        reason="move",
        num_tokens_so_far=3,
    )


def recorded(turn: str) -> seen.TurnRecorded:
    record = TurnRecord(
        turn=turn,
        execution=turn.partition(".")[0],
        attempt=0,
        parent="",
        fork_reason="",
        role="main",
        num_kept_tokens=0,
        num_new_prompt_tokens=1,
        num_completion_tokens=4,
        spans=[],
        finish="stop",
        is_committed=True,
        ref=SegmentRef(segment=0, offset_bytes=8, crc32=0),
        received_s=0.0,
        first_token_s=0.0,
        ended_s=0.0,
        held_s=0.0,
        num_continuations=1,
    )
    return seen.TurnRecorded(turn=record)


def lost(*executions: str, gone_s: float | None = 1.25) -> seen.GatewayLost:
    return seen.GatewayLost(
        gateway="gateway0",
        incarnation=1,
        reason="gateway0 ended with code -9",
        executions=list(executions),
        gone_s=gone_s,
    )


def rows(*values: JournalValue) -> list[Row]:
    return [
        Row(seq=number, now_s=float(number), kind="observation", value=value)
        for number, value in enumerate(values, start=1)
    ]


def test_a_call_that_ended_with_its_gateway_is_no_lost_continuation() -> None:
    state = fold(
        rows(
            continued("e1.t1"),
            recorded("e1.t1"),
            continued("e1.t2"),
            continued("e2.t1"),
            lost("e1"),
            continued("e1.t2"),
        )
    )
    assert [one.turn for _, one in state.continued] == ["e1.t1", "e2.t1", "e1.t2"]
    assert summarise(state)["gateway_deaths"] == 1


def test_a_death_is_told_in_one_line() -> None:
    reason = "gateway0 ended with code -9"
    assert notes_of(lost("e1", "e2")) == [f"gateway0 back after 1.2 s with 2 executions: {reason}"]
    assert notes_of(lost("e1", gone_s=None)) == [f"gateway0 lost with 1 execution: {reason}"]
