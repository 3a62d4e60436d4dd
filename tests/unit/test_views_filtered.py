"""Filtered groups in what is told of a run: fold, summary, its words, and verify."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_run import record

from opengyre.control import facts as f
from opengyre.control.facts import VerdictGiven
from opengyre.control.groups import GroupState
from opengyre.store import observations as seen
from opengyre.store.codec import decode
from opengyre.store.journal import Row
from opengyre.store.segments import SegmentReader
from opengyre.views.fold import fold
from opengyre.views.summary import summarise
from opengyre.views.verify import verify_rows
from opengyre.views.words import final_lines

GROUP = "g00001"


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    return record(tmp_path).rows


def filtering(rows: list[Row]) -> list[Row]:
    """The same journal of a run that filters."""
    return changed(rows, seen.RunStarted, scheduler={"filter_zero_variance": True})


def changed(rows: list[Row], kind: type[Any], *, of: str = "", **fields: Any) -> list[Row]:
    """With other fields in each row of `kind`, of one execution if named."""
    result = []
    for row in rows:
        value: Any = row.value
        if isinstance(value, kind) and (not of or value.execution == of):
            is_struct = isinstance(value, msgspec.Struct)
            put = msgspec.structs.replace if is_struct else replace
            row = replace(row, value=put(value, **fields))
        result.append(row)
    return result


def level(rows: list[Row]) -> list[Row]:
    """Every verdict says the same."""
    return changed(rows, f.VerdictGiven, shaped=0.5)


def test_a_run_without_the_filter_has_no_filtered_group(rows: list[Row]) -> None:
    groups = summarise(fold(level(rows)))["groups"]
    assert (groups["filtered"], groups["void"]) == (0, 0)
    assert groups["consumed"] > 0


def test_a_group_that_is_not_trained_is_filtered_when_its_values_do_not_differ(
    rows: list[Row],
) -> None:
    untrained = [row for row in rows if not isinstance(row.value, f.GroupAssigned)]
    state = fold(level(filtering(untrained)))
    groups = summarise(state)["groups"]
    assert groups["filtered"] == groups["dispatched"] > 0
    assert not state.open_groups
    assert state.num_ready == 0


def test_groups_are_told_apart_and_add_up(rows: list[Row]) -> None:
    summary = summarise(fold(rows))
    groups = dict(summary["groups"])
    assert groups.pop("dispatched") == sum(groups.values())
    summary["groups"] = {"dispatched": 9, "consumed": 4, "filtered": 3, "void": 2, "unused": 0}
    (line,) = [one for one in final_lines(summary) if one.startswith("  groups ")]
    assert line.endswith(
        "9 dispatched, 4 trained, 3 filtered (equal rewards), 2 void (too few valid members)"
    )


def test_verify_finds_a_filtered_group_in_a_step(rows: list[Row], tmp_path: Path) -> None:
    def problems(damaged: list[Row]) -> tuple[str, ...]:
        told = verify_rows(damaged, SegmentReader(tmp_path / "tokens"))
        return next(one.problems for one in told if one.promise == "P8")

    assert problems(level(rows)) == ()
    found = problems(level(filtering(rows)))
    assert any(f"took {GROUP} though it is filtered" in one for one in found)


def test_an_excluded_member_makes_its_group_void_when_too_few_are_left(rows: list[Row]) -> None:
    member = fold(rows).groups[GROUP].members[0]
    rows = changed(rows, seen.RunStarted, min_valid_members=2)
    untrained = [row for row in rows if not isinstance(row.value, f.GroupAssigned)]
    state = fold(changed(untrained, f.VerdictGiven, of=member, exclusion="truncated"))
    assert state.ended_state(state.groups[GROUP]) is GroupState.VOID
    assert state.executions[member].reward is not None


def test_a_verdict_of_an_older_journal_is_read_and_takes_part_as_it_did() -> None:
    body = b'{"execution":"e000001","reward":0.5,"reason":"","num_trainable_tokens":2}'
    told = decode(b'["VerdictGiven",' + body + b"]")
    assert isinstance(told, VerdictGiven)
    assert told.value == told.reward == 0.5
