"""What a group trains, read from records on disk."""

import asyncio
from pathlib import Path

import msgspec

from opengyre.config.training import TrainingConfig
from opengyre.runtime.book import Book
from opengyre.runtime.trained_groups import TrainedGroups
from opengyre.seams.records import Span, TokenRecord, TurnRecord
from opengyre.store.segments import SegmentReader, SegmentWriter
from opengyre.trajectory.account import TokenAccount
from tests.unit.test_runtime_book import OneTask, turn

MEMBERS = ("e000000", "e000001", "e000002")


def record(execution: str, number: int) -> TokenRecord:
    header = msgspec.structs.replace(
        turn(number),
        turn=f"{execution}.t{number}",
        execution=execution,
        num_completion_tokens=2,
        spans=[Span(start=0, end=2, policy_version=0, engine="c0")],
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=[1],
        completion_ids=[2, 3],
        logprobs=[-0.5, -0.5],
        request_delta=b"",
    )


def recorded(folder: Path) -> list[TurnRecord]:
    writer = SegmentWriter(folder)
    made = [record(name, 1) for name in MEMBERS]
    turns = [msgspec.structs.replace(one.header, ref=writer.append(one)) for one in made]
    asyncio.run(writer.sync())
    return turns


def groups_of(folder: Path, turns: list[TurnRecord]) -> TrainedGroups:
    book = Book(train=OneTask(), evaluation=None, seed=0)
    book.add_group("g00000", MEMBERS, burst=0, version=0)
    for number, one in enumerate(turns):
        book.tell_turn(one)
        book.executions[one.execution].reward = float(number)
    return TrainedGroups(book, SegmentReader(folder), config=TrainingConfig())


def test_a_damaged_record_costs_its_execution_its_part_and_no_other(tmp_path: Path) -> None:
    turns = recorded(tmp_path)
    (path,) = tmp_path.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[turns[1].ref.offset_bytes + 20] ^= 0xFF
    path.write_bytes(data)
    told = groups_of(tmp_path, turns).group("g00000")
    assert [one.advantage is None for one in told.members] == [False, True, False]
    assert [row.execution for row in told.rows] == ["e000000", "e000002"]
    assert told.members[1].account == TokenAccount()


def test_a_record_that_contradicts_another_costs_its_execution_its_part(tmp_path: Path) -> None:
    turns = recorded(tmp_path)
    twice = groups_of(tmp_path, turns)
    twice._book.executions["e000002"].turns.append(turns[2])
    told = twice.group("g00000")
    assert [one.advantage is None for one in told.members] == [False, False, True]


def test_tokens_of_a_launch_that_was_given_up_are_dropped(tmp_path: Path) -> None:
    turns = recorded(tmp_path)
    groups = groups_of(tmp_path, turns)
    groups._book.begin_launch(groups._book.executions["e000000"])
    account = groups.group("g00000").members[0].account
    assert account == TokenAccount(sampled=2, dropped={"relaunched": 2})
