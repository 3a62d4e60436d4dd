"""The tables of what roles held, made from the changes of role in a journal."""

import re
from pathlib import Path
from typing import Any

from opengyre.seams.memory import MemoryHeld, MemoryReport
from opengyre.store.codec import decode, encode
from opengyre.store.journal import Row
from opengyre.store.observations import Role, RoleChange
from opengyre.views.fold import fold
from opengyre.views.memory import role_memory_cells, switch_cells
from opengyre.views.run_state import RunState

MIB = 2**20
PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def _held(**mib: float) -> MemoryHeld:
    return MemoryHeld(**{f"{name}_bytes": int(number * MIB) for name, number in mib.items()})


def _change(role: Role, memory: MemoryReport | None, *, cell: int = 0) -> RoleChange:
    return RoleChange(cell=cell, role=role, started_s=1.0, ended_s=3.5, memory=memory)


def _state(*changes: RoleChange) -> RunState:
    rows = [
        Row(seq=seq, now_s=float(seq), kind="observation", value=decode(encode(one)))
        for seq, one in enumerate(changes, start=1)
    ]
    return fold(rows)


TO_TRAINING = _change(
    Role.TRAINING,
    MemoryReport(
        before=_held(weights=2, kv_used=8, resident=100),
        after=_held(weights=2, gradients=2, resident=95),
        predicted=_held(weights=2, gradients=2, activations=9),
    ),
)
TO_ROLLOUT = _change(
    Role.ROLLOUT,
    MemoryReport(
        before=_held(weights=2, gradients=2, activations=6, resident=110),
        after=_held(weights=2, kv_pool=16, resident=90),
        predicted=_held(weights=2, kv_pool=16, kv_used=16),
    ),
)


def test_a_role_shows_what_was_predicted_and_the_most_that_was_found_in_it() -> None:
    rows = {
        (one["role"], one["MiB"]): one for one in role_memory_cells(_state(TO_TRAINING, TO_ROLLOUT))
    }
    assert list(rows) == [
        ("rollout", "predicted"),
        ("rollout", "measured"),
        ("training", "predicted"),
        ("training", "measured"),
    ]
    measured = rows["rollout", "measured"]
    assert (measured["kv pool"], measured["kv used"], measured["resident"]) == (16, 8, 100)
    measured = rows["training", "measured"]
    assert (measured["gradients"], measured["activations"], measured["resident"]) == (2, 6, 110)
    assert rows["training", "predicted"]["activations"] == 9


def test_a_change_shows_what_it_freed() -> None:
    (line,) = switch_cells(_state(TO_TRAINING))
    assert line == {
        "cell": "c0",
        "becomes": "training",
        "at s": 3.5,
        "took s": 2.5,
        "kv before": 8.0,
        "sums before": 0.0,
        "resident before": 100.0,
        "resident after": 95.0,
    }


def test_a_cell_without_a_prediction_shows_what_was_measured_alone() -> None:
    report = MemoryReport(before=_held(), after=_held(weights=1), predicted=_held())
    rows = role_memory_cells(_state(_change(Role.TRAINING, report, cell=3)))
    assert [(one["cell"], one["role"], one["MiB"]) for one in rows] == [
        ("c3", "rollout", "measured"),
        ("c3", "training", "measured"),
    ]


def test_a_change_of_an_older_journal_still_reads_and_has_no_rows() -> None:
    body: Any = (
        b'["RoleChange",{"cell":0,"role":"training","started_s":1.0,"ended_s":2.0,'
        b'"memory_bytes_by_state":{"training":5}}]'
    )
    old = decode(body)
    assert isinstance(old, RoleChange)
    assert old.memory is None
    state = _state(old)
    assert role_memory_cells(state) == switch_cells(state) == []


def test_the_page_explains_each_column_and_shows_a_table_with_them() -> None:
    columns = list(role_memory_cells(_state(TO_TRAINING, TO_ROLLOUT))[0])
    explained = PAGE.partition("\n| held |")[2].partition("\n\n")[0]
    first = [line.split("|")[1] for line in explained.splitlines()[2:]]
    assert re.findall(r"`([^`]+)`", " ".join(first)) == columns[3:]
    shown = PAGE.partition("cut to 4 steps:\n\n```\n")[2].partition("```")[0].splitlines()
    assert shown[0].split() == " ".join(columns).split()
    assert len({len(line) for line in shown}) == 1
