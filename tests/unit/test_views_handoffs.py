"""What `gyre run show`, its JSON and `verify` say of prefixes that engines kept for each other."""

import msgspec

from opengyre.seams.kv import HandoffStage, KVRelease
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
    counts = ("handed over", "recomputed", "idle", "not wanted", "tokens cached", "MiB read")
    first, second = handoff_cells(state)
    assert [first[name] for name in ("kept by", *counts)] == ["c1", 2, 1, 1, 2, 320, 0.31]
    assert [second[name] for name in ("kept by", *counts)] == ["c2", 0, 0, 0, 1, 0, 0.0]
    assert (first["read s"], second["read s"]) == (2.0, 0.0)
    assert summarise(state)["handoffs"] == {
        "handed_over": 2,
        "recomputed": 1,
        "idle": 1,
        "not_wanted": 3,
        "leases_ended": 0,
        "cached_tokens": 320,
        "read_bytes": 320 * 1024,
    }


def test_why_prefixes_were_recomputed_and_how_many_leases_ended_is_said() -> None:
    refused = told("kv1", OFFERED, ACKNOWLEDGED, read=0)
    late = told("kv2", OFFERED, RELEASED)
    cancelled = told("kv3", OFFERED, ACKNOWLEDGED, RELEASED)
    why = "no slot is free"
    refused[1] = msgspec.structs.replace(refused[1], reason=why)
    late[1] = msgspec.structs.replace(late[1], reason=str(KVRelease.LEASE_ENDED))
    state = state_of(refused, late, cancelled)
    assert handoff_words(state)[1:] == [
        "1 recomputed: no slot is free",
        "1 recomputed: not acknowledged while its lease lasted",
    ]
    (row,) = handoff_cells(state)
    assert (row["recomputed because"], row["leases ended"]) == ("no slot is free", 1)
    assert (row["recomputed"], row["not wanted"]) == (2, 1)
    assert summarise(state)["handoffs"]["leases_ended"] == 1


def test_a_run_that_kept_nothing_says_nothing() -> None:
    assert handoff_words(state_of()) == []
    assert handoff_cells(state_of()) == []
