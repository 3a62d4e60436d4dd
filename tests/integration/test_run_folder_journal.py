"""The journal on a real disk: durability, order, one writer, and the tables beside it."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from opengyre.control.commands import Cancel, DispatchEval, DispatchGroups, Launch, Plan
from opengyre.control.facts import ExecutionClosed, GroupAssigned, Outcome, VerdictGiven
from opengyre.control.ids import CommandId, EngineId, GroupId, execution_id
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.records import SegmentRef, Span, TurnRecord
from opengyre.store import derive, journal
from opengyre.store.codec import JournalValue
from opengyre.store.journal import open_for_reading, open_journal, read_journal
from opengyre.store.observations import (
    EvalResult,
    GroupTask,
    LaunchRecorded,
    StepReport,
    TurnRecorded,
    VersionPublished,
)

E1, E2, E3, E4 = map(execution_id, range(1, 5))
GROUP = GroupId("g00001")
ENGINE = EngineId("s0")


def closed(number: int) -> ExecutionClosed:
    return ExecutionClosed(execution=execution_id(number), outcome=Outcome.COMPLETED)


def turn(name: str, *, attempt: int = 1) -> TurnRecorded:
    record = TurnRecord(
        turn=name,
        execution=name.partition(".")[0],
        attempt=attempt,
        parent="",
        fork_reason="",
        role="main",
        num_kept_tokens=0,
        num_new_prompt_tokens=3,
        num_completion_tokens=2,
        spans=[Span(start=0, end=2, policy_version=0, engine="s0")],
        finish="stop",
        is_committed=True,
        ref=SegmentRef(segment=0, offset_bytes=8, crc32=2**32 - 1),
        received_s=1.0,
        first_token_s=1.1,
        ended_s=1.2,
        held_s=0.0,
        num_continuations=0,
    )
    return TurnRecorded(turn=record)


def a_small_run() -> list[JournalValue]:
    one, two = CommandId(1), CommandId(2)
    return [
        Plan(
            commands=(
                DispatchGroups(
                    command_id=one, reason="start", groups=((GROUP, (E1, E2)),), version=0, burst=0
                ),
                DispatchEval(
                    command_id=two, reason="start", executions=(E3, E4), version=0, burst=0
                ),
                Launch(command_id=CommandId(3), reason="free slot", execution=E1, engine=ENGINE),
                Cancel(command_id=CommandId(4), reason="end", execution=E4, was_queued=True),
            )
        ),
        GroupTask(group=GROUP, task="trail-7"),
        LaunchRecorded(execution=E1, task="trail-7", group=GROUP, launch_number=1),
        turn("e000001.t0"),
        closed(1),
        ExecutionClosed(execution=E1, outcome=Outcome.LOST),
        VerdictGiven(execution=E1, reward=0.5, reason="", num_trainable_tokens=2, shaped=0.25),
        VerdictGiven(execution=E2, reward=None, reason="grader crashed", num_trainable_tokens=0),
        GroupAssigned(group=GROUP, step=0),
        StepReport(
            step=0,
            version_before=0,
            version_after=1,
            groups=[GROUP],
            micro_steps=[0],
            num_executions=2.0,
            num_tokens=2,
            loss=None,
            grad_norm=0.1,
            is_applied=True,
            is_short=True,
            mean_reward=0.5,
            mean_shaped=0.25,
            opened_s=0.5,
            closed_s=2.0,
        ),
        VersionPublished(engine="s0", version=1, checksum=2**60, held_s=0.01, num_continued=1),
        EvalResult(burst=0, version=0, rewards=[1.0, None, 0.5]),
    ]


def dump(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with closing(open_for_reading(path)) as db:
        return {
            table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in derive.TABLES
        }


async def write(path: Path, values: list[JournalValue]) -> None:
    async with open_journal(path) as one:
        for number, value in enumerate(values):
            one.append(float(number), value)


def test_rows_come_back_in_the_order_they_were_appended_with_their_times(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    values = a_small_run()
    asyncio.run(write(path, values))
    rows = list(read_journal(path))
    assert [row.value for row in rows] == values
    assert [row.seq for row in rows] == list(range(1, len(values) + 1))
    assert [row.now_s for row in rows] == [float(n) for n in range(len(values))]
    assert [row.seq for row in read_journal(path, after_seq=10)] == [11, 12]


def test_the_tables_say_what_the_journal_says_and_a_rebuild_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    asyncio.run(write(path, a_small_run()))
    before = dump(path)
    outcomes = {row[0]: (row[1], row[10], row[12], *row[15:]) for row in before["executions"]}
    assert outcomes == {
        E1: (GROUP, "completed", 0.5, 0.25, ""),
        E2: (GROUP, None, None, None, ""),
        E3: (None, None, None, None, None),
        E4: (None, "cancelled", None, None, None),
    }
    assert before["steps"][0][-1] == 0.25
    assert before["groups"][0][1:4] == ("trail-7", 0, 0)
    assert before["groups"][0][6:] == (0, 0, None)
    assert before["evals"][0][2:5] == (0.75, 2, 1)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM executions")
        db.execute("DROP TABLE turns")
    assert derive.rebuild(path) == 12
    assert dump(path) == before


def test_a_reopened_journal_goes_on_after_its_last_row(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    asyncio.run(write(path, [closed(1), closed(2)]))

    async def again() -> int:
        async with open_journal(path) as one:
            assert one.committed_seq == 2
            return await one.record(9.0, closed(3))

    assert asyncio.run(again()) == 3
    assert [row.seq for row in read_journal(path)] == [1, 2, 3]


def test_committed_rows_are_readable_while_the_writer_lives(tmp_path: Path) -> None:
    path = tmp_path / "run.db"

    async def scenario() -> list[int]:
        async with open_journal(path) as one:
            seqs = [one.append(0.0, closed(n)) for n in range(50)]
            assert one.committed_seq == 0
            await one.committed(seqs[-1])
            return [row.seq for row in read_journal(path)]

    assert asyncio.run(scenario()) == list(range(1, 51))


def test_rows_of_one_tick_share_a_commit(tmp_path: Path) -> None:
    async def scenario() -> int:
        async with open_journal(tmp_path / "run.db") as one:
            seqs = [one.append(0.0, closed(n)) for n in range(20)]
            async with asyncio.TaskGroup() as tasks:
                waiting = [tasks.create_task(one.committed(seq)) for seq in seqs]
                await one.committed(seqs[0])
            assert all(task.done() for task in waiting)
            return one.committed_seq

    assert asyncio.run(scenario()) == 20


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.db"

    async def scenario() -> None:
        async with open_journal(path) as one:
            with pytest.raises(ConfigError, match="another process is writing this run"):
                async with open_journal(path):
                    pass
            await one.record(0.0, closed(1))

    asyncio.run(scenario())
    asyncio.run(write(path, [closed(2)]))
    assert len(list(read_journal(path))) == 2


def test_another_schema_a_foreign_file_and_no_file_are_each_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    asyncio.run(write(path, [closed(1)]))
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=7")
    with pytest.raises(ConfigError, match=r"run\.db: schema 7, but this gyre reads 1"):
        list(read_journal(path))
    with pytest.raises(ConfigError, match="schema 7"):
        asyncio.run(write(path, [closed(1)]))
    foreign = tmp_path / "other.db"
    foreign.write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigError, match=r"not a run\.db"):
        list(read_journal(foreign))
    with pytest.raises(ConfigError, match="no such file"):
        list(read_journal(tmp_path / "nowhere.db"))


def test_a_closed_or_full_journal_refuses_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with open_journal(tmp_path / "run.db") as one:
            monkeypatch.setattr(journal, "MAX_PENDING_ROWS", 2)
            one.append(0.0, closed(1))
            one.append(0.0, closed(2))
            with pytest.raises(BoundaryError, match="is 2 rows behind"):
                one.append(0.0, closed(3))
        with pytest.raises(BoundaryError, match="is closed"):
            one.append(0.0, closed(3))

    asyncio.run(scenario())
    assert len(list(read_journal(tmp_path / "run.db"))) == 2


def test_a_failed_disk_fails_the_waiter_and_every_later_row(tmp_path: Path) -> None:
    path = tmp_path / "run.db"

    async def scenario() -> None:
        async with open_journal(path) as one:
            await one.record(0.0, closed(1))
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("DROP TABLE journal")
            with pytest.raises(BoundaryError, match=r"cannot write .*: no such table: journal"):
                await one.record(1.0, closed(2))
            with pytest.raises(BoundaryError, match="cannot write"):
                one.append(2.0, closed(3))

    with pytest.raises(BoundaryError, match="cannot write"):
        asyncio.run(scenario())


WRITER = """
import asyncio, sys
from pathlib import Path
from opengyre.control.facts import ExecutionClosed, Outcome
from opengyre.control.ids import execution_id
from opengyre.store.journal import open_journal

async def main():
    async with open_journal(Path(sys.argv[1])) as one:
        for n in range(100_000):
            fact = ExecutionClosed(execution=execution_id(n), outcome=Outcome.COMPLETED)
            seq = one.append(float(n), fact)
            if n % 3 == 0:
                await one.committed(seq)
                print(seq, flush=True)

asyncio.run(main())
"""


def test_every_row_that_was_told_committed_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            told = [int(process.stdout.readline()) for _ in range(20)]
            os.kill(process.pid, signal.SIGKILL)
            told += [int(line) for line in process.stdout]
        seqs = [row.seq for row in read_journal(path)]
        assert seqs == list(range(1, len(seqs) + 1))
        assert seqs[-1] >= told[-1]
    derive.rebuild(path)
