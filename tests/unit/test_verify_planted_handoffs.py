"""P6 and P16 of prefixes that engines keep for each other: what breaks them is found."""

from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_run import record

from opengyre.seams.kv import HandoffStage
from opengyre.seams.records import Span
from opengyre.store import observations as seen
from tests.planting import Planting


@pytest.fixture
def run(tmp_path: Path) -> Planting:
    return Planting(rows=record(tmp_path).rows, tokens=tmp_path)


def stage(run: Planting, name: HandoffStage) -> int:
    (place,) = run.where(seen.Handoff, stage=name)
    return place


def published(engine: str, version: int) -> seen.VersionPublished:
    return seen.VersionPublished(
        engine=engine, version=version, checksum=9, held_s=0.0, num_continued=0
    )


def released_never(run: Planting) -> None:
    run.drop(stage(run, HandoffStage.RELEASED))


def released_twice(run: Planting) -> None:
    place = stage(run, HandoffStage.RELEASED)
    run.insert(place, run.rows[place].value)


def released_before_it_was_taken_over(run: Planting) -> None:
    place = stage(run, HandoffStage.RELEASED)
    run.move(place, stage(run, HandoffStage.TAKEN_OVER))


def offered_after_it_was_acknowledged(run: Planting) -> None:
    run.move(stage(run, HandoffStage.OFFERED), stage(run, HandoffStage.ACKNOWLEDGED))


def acknowledged_by_another_engine(run: Planting) -> None:
    run.change(stage(run, HandoffStage.ACKNOWLEDGED), to_engine="c1")


def acknowledged_more_than_there_was(run: Planting) -> None:
    run.change(stage(run, HandoffStage.ACKNOWLEDGED), num_tokens=6)


def taken_over_without_an_acknowledgement(run: Planting) -> None:
    run.drop(stage(run, HandoffStage.ACKNOWLEDGED))


def an_idle_prefix_taken_over(run: Planting) -> None:
    for place, _ in enumerate(run.rows):
        if isinstance(run.rows[place].value, seen.Handoff):
            run.change(place, turn="")


def taken_over_twice(run: Planting) -> None:
    place = stage(run, HandoffStage.TAKEN_OVER)
    run.insert(place, run.rows[place].value)


def one_reference_for_two_turns(run: Planting) -> None:
    run.change(stage(run, HandoffStage.ACKNOWLEDGED), turn="e000001.t1")


def read_after_another_version_was_loaded(run: Planting) -> None:
    run.insert(stage(run, HandoffStage.OFFERED), published("s0", 1))


def kept_at_a_publication(run: Planting) -> None:
    """A standalone engine changes weights only: who kept it was told to at a publication."""
    for place in run.where(seen.Handoff):
        run.change(place, from_engine="s0", to_engine="c0")


def sampled_under_another_version(run: Planting) -> None:
    run.change_turn(
        "e000002.t0",
        spans=[
            Span(start=0, end=2, policy_version=0, engine="c0"),
            Span(start=2, end=6, policy_version=1, engine="s0"),
        ],
    )


PLANTED: tuple[tuple[Callable[[Planting], None], str, str], ...] = (
    (released_never, "P16", "c0#1.kv1 was never released"),
    (released_twice, "P16", "released: it was released before"),
    (released_before_it_was_taken_over, "P16", "taken_over: it was released before"),
    (offered_after_it_was_acknowledged, "P16", "acknowledged: s0 was not offered it"),
    (acknowledged_by_another_engine, "P16", "acknowledged: c1 was not offered it"),
    (acknowledged_more_than_there_was, "P16", "acknowledged: 6 of 5 tokens"),
    (taken_over_without_an_acknowledgement, "P16", "taken_over: s0 did not acknowledge it"),
    (an_idle_prefix_taken_over, "P16", "taken_over: an idle prefix has no turn that could"),
    (taken_over_twice, "P16", "taken_over: it was taken over before"),
    (one_reference_for_two_turns, "P16", "its turn was e000002.t0, is e000001.t1"),
    (read_after_another_version_was_loaded, "P6", "of version 0, it had loaded 1"),
    (kept_at_a_publication, "P6", "s0 kept c0#1.kv1: it never leaves, and a publication hands"),
    (sampled_under_another_version, "P6", "taken over at s0, s0 sampled under version 1"),
)


@pytest.mark.parametrize(
    ("plant", "promise", "words"), PLANTED, ids=[one[0].__name__ for one in PLANTED]
)
def test_what_breaks_the_promises_of_a_handoff_is_found(
    run: Planting, plant: Callable[[Planting], None], promise: str, words: str
) -> None:
    plant(run)
    found = run.results()[promise]
    assert any(words in one for one in found.problems), found.problems


def test_a_handoff_is_counted_in_words(run: Planting) -> None:
    results = run.results()
    assert (results["P6"].num_checked, results["P16"].num_checked) == (1, 1)
    told = "1 handed over, 0 recomputed, 0 idle, 0 not wanted; 5 tokens cached, 500 bytes read"
    assert results["P16"].notes == (told,)


def test_who_died_with_its_gateway_released_nothing(run: Planting) -> None:
    released_never(run)
    lost = seen.GatewayLost(
        gateway="g0", incarnation=1, reason="killed", executions=["e000002"], gone_s=0.5
    )
    run.insert(stage(run, HandoffStage.TAKEN_OVER) + 1, lost)
    result = run.results()["P16"]
    assert result.is_kept
    assert result.notes[0] == "1 not released when the journal or a gateway ended"


def test_a_reader_that_died_leaves_the_prefix_to_the_next(run: Planting) -> None:
    first = stage(run, HandoffStage.OFFERED)
    tried = [run.rows[first].value, run.rows[first + 1].value]
    for value in reversed(tried):
        run.insert(first, value)
    results = run.results()
    assert results["P16"].problems == ()
    assert results["P6"].num_checked == 2


def test_a_version_that_the_reader_loaded_before_is_the_one_it_may_read(run: Planting) -> None:
    """Its publication may be told while the request is already there."""
    run.insert(stage(run, HandoffStage.ACKNOWLEDGED), published("s0", 0))
    assert run.results()["P6"].problems == ()


@pytest.mark.parametrize("engine", ["c0", "s0"])
def test_a_publication_may_be_told_of_before_what_was_read_ahead_of_it(
    run: Planting, engine: str
) -> None:
    run.insert(stage(run, HandoffStage.ACKNOWLEDGED), published(engine, 1))
    result = run.results()["P6"]
    assert result.problems == ()
    words = "1 acknowledged after a publication at their source or reader"
    assert result.notes == (words,)
