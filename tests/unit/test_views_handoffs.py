"""What `gyre run show`, its JSON and `verify` say of prefixes that engines kept for each other."""

from opengyre.seams.kv import HandoffStage
from opengyre.store.codec import kind_of
from opengyre.store.journal import Row
from opengyre.store.observations import Handoff
from opengyre.views.fold import fold
from opengyre.views.handoffs import handoff_cells, handoff_words
from opengyre.views.run_state import RunState
from opengyre.views.summary import summarise

OFFERED, ACKNOWLEDGED = HandoffStage.OFFERED, HandoffStage.ACKNOWLEDGED
TAKEN_OVER, RELEASED = HandoffStage.TAKEN_OVER, HandoffStage.RELEASED


def told(
    ref: str, *stages: HandoffStage, turn: str = "t", read: int = 80, at: str = "c1"
) -> list[Handoff]:
    """`read` of the 80 tokens of `ref` were read, 1 KiB each, in half a second."""
    return [
        Handoff(
            ref=ref,
            stage=stage,
            execution="e1",
            turn=turn,
            from_engine=at,
            to_engine="s0",
            version=1,
            num_tokens=read if stage is ACKNOWLEDGED else 80,
            num_bytes=1024 * (read if stage is ACKNOWLEDGED else 80),
            read_s=0.5 if stage is ACKNOWLEDGED else 0.0,
        )
        for stage in stages
    ]


def state_of(*handoffs: list[Handoff]) -> RunState:
    rows = [one for told in handoffs for one in told]
    return fold(Row(seq=n, now_s=n, kind=kind_of(one), value=one) for n, one in enumerate(rows))


def test_each_prefix_counts_once_by_what_became_of_it() -> None:
    whole = (OFFERED, ACKNOWLEDGED, TAKEN_OVER, RELEASED)
    state = state_of(
        told("kv1", *whole),
        told("kv2", *whole, read=0),
        told("kv3", OFFERED, ACKNOWLEDGED, *whole),
        told("kv4", OFFERED, RELEASED),
        told("kv5", RELEASED),
        told("kv6", OFFERED, ACKNOWLEDGED, RELEASED, turn=""),
        told("kv7", OFFERED, RELEASED, turn="", at="c2"),
    )
    row = {"idle": 1, "not wanted": 1, "tokens cached": 320, "MiB read": 0.31, "read s": 2.0}
    nothing = {"idle": 0, "not wanted": 1, "tokens cached": 0, "MiB read": 0.0, "read s": 0.0}
    assert handoff_cells(state) == [
        {"kept by": "c1", "handed over": 2, "recomputed": 2, **row},
        {"kept by": "c2", "handed over": 0, "recomputed": 0, **nothing},
    ]
    assert summarise(state)["handoffs"] == {
        "handed_over": 2,
        "recomputed": 2,
        "idle": 1,
        "not_wanted": 2,
        "cached_tokens": 320,
        "read_bytes": 320 * 1024,
    }


def test_a_run_that_kept_nothing_says_nothing() -> None:
    assert handoff_words(state_of()) == []
    assert handoff_cells(state_of()) == []
