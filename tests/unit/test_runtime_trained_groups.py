"""What a group trains, read from records on disk."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from opengyre.config.training import TrainingConfig
from opengyre.runtime.book import Book
from opengyre.runtime.trained_groups import TrainedGroups
from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.store.segments import SegmentReader, SegmentWriter
from opengyre.trainer.wire import micro_step
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


GROUPS = ("g00000", "g00001", "g00002", "g00003")
PATIENCE_S = 5.0


class HeldReader(SegmentReader):
    """Reads when it may, and remembers in which thread and of what."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_read = threading.Event()
        self.threads: set[int] = set()
        self.num_read = 0

    def read(self, ref: SegmentRef) -> TokenRecord:
        assert self.may_read.wait(PATIENCE_S)
        self.threads.add(threading.get_ident())
        self.num_read += 1
        return super().read(ref)


class Prepared:
    """Four groups of two members each, and their rows made beside the test."""

    def __init__(self, folder: Path, *, lookahead_groups: int = 2) -> None:
        writer = SegmentWriter(folder)
        self.book = Book(train=OneTask(), evaluation=None, seed=0)
        for number, group in enumerate(GROUPS):
            members = (f"e{2 * number:06d}", f"e{2 * number + 1:06d}")
            self.book.add_group(group, members, burst=0, version=0)
            for reward, name in enumerate(members):
                made = record(name, 1)
                ref = writer.append(made)
                self.book.tell_turn(msgspec.structs.replace(made.header, ref=ref))
                self.book.executions[name].reward = float(reward)
        asyncio.run(writer.sync())
        self.reader = HeldReader(folder)
        config = TrainingConfig(lookahead_groups=lookahead_groups)
        self.groups = TrainedGroups(self.book, self.reader, config=config)
        self.num_wakes = 0
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self.num_wakes += 1
        self._woken.set()

    @property
    def names(self) -> list[str]:
        """Groups that a claim would get now."""
        return [one for one in GROUPS if self.groups.prepared(one) is not None]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.groups.prepare(self.wake))
        try:
            yield
        finally:
            self.reader.may_read.set()
            task.cancel()
            await asyncio.wait([task])

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._woken.clear()
                await self._woken.wait()


def test_the_next_groups_are_made_in_a_thread_and_no_more_than_are_looked_ahead(
    tmp_path: Path,
) -> None:
    made = Prepared(tmp_path)

    async def look() -> None:
        async with made.running():
            made.groups.look_ahead(GROUPS, ())
            made.reader.may_read.set()
            await made.until(lambda: made.num_wakes == 2)
            await asyncio.sleep(0.01)
            assert made.names == ["g00000", "g00001"]
            made.groups.look_ahead(GROUPS[1:], {"g00000"})
            await made.until(lambda: made.num_wakes == 3)
            assert made.names == ["g00000", "g00001", "g00002"]

    asyncio.run(look())
    assert threading.get_ident() not in made.reader.threads
    assert made.reader.num_read == 6


def test_the_loop_goes_on_while_a_group_is_made(tmp_path: Path) -> None:
    made = Prepared(tmp_path)

    async def look() -> int:
        num_turns = 0
        async with made.running():
            made.groups.look_ahead(GROUPS, ())
            for _ in range(20):
                await asyncio.sleep(0.001)
                num_turns += 1
            assert made.names == []
        return num_turns

    assert asyncio.run(look()) == 20


def test_a_group_that_is_gone_before_it_is_made_is_let_go(tmp_path: Path) -> None:
    made = Prepared(tmp_path)

    async def look() -> None:
        async with made.running():
            made.groups.look_ahead(GROUPS[:1], ())
            await asyncio.sleep(0.01)
            made.groups.look_ahead(GROUPS[2:3], ())
            made.reader.may_read.set()
            await made.until(lambda: made.num_wakes == 1)
            assert made.names == ["g00002"]

    asyncio.run(look())


def test_a_group_that_is_forgotten_while_it_is_made_is_let_go(tmp_path: Path) -> None:
    made = Prepared(tmp_path)

    async def look() -> None:
        async with made.running():
            made.groups.look_ahead(GROUPS[:2], ())
            await asyncio.sleep(0.01)
            made.groups.forget(GROUPS[0])
            made.book.forget_group(GROUPS[0])
            made.reader.may_read.set()
            await made.until(lambda: made.num_wakes == 1)
            assert made.names == ["g00001"]

    asyncio.run(look())


def test_a_prepared_group_that_older_ones_push_back_is_let_go_and_an_assigned_one_stays(
    tmp_path: Path,
) -> None:
    made = Prepared(tmp_path, lookahead_groups=1)

    async def look() -> None:
        async with made.running():
            made.reader.may_read.set()
            made.groups.look_ahead(GROUPS[3:], ())
            await made.until(lambda: made.names == ["g00003"])
            made.groups.look_ahead(GROUPS[2:], ())
            await made.until(lambda: made.names == ["g00002"])
            made.groups.look_ahead(GROUPS[3:], {"g00002"})
            await made.until(lambda: made.names == ["g00002", "g00003"])

    asyncio.run(look())


def test_an_abandoned_step_leaves_nothing_that_the_next_one_does_not_look_ahead_to(
    tmp_path: Path,
) -> None:
    made = Prepared(tmp_path)

    async def look() -> None:
        async with made.running():
            made.reader.may_read.set()
            made.groups.look_ahead(GROUPS[:2], ())
            await made.until(lambda: made.num_wakes == 2)
            made.groups.look_ahead(GROUPS[1:2], {"g00000"})
            made.groups.look_ahead(GROUPS[3:], ())
            await made.until(lambda: "g00003" in made.names)
            assert made.names == ["g00000", "g00003"]

    asyncio.run(look())


def test_rows_are_the_same_ahead_or_at_once_and_made_again(tmp_path: Path) -> None:
    made = Prepared(tmp_path, lookahead_groups=4)
    made.reader.may_read.set()

    async def look() -> None:
        async with made.running():
            made.groups.look_ahead(GROUPS, ())
            await made.until(lambda: made.num_wakes == 4)

    asyncio.run(look())
    ahead = [told_of(made.groups, group) for group in GROUPS]
    for group in GROUPS:
        made.groups.forget(group)
    assert [told_of(made.groups, group) for group in GROUPS] == ahead


def told_of(groups: TrainedGroups, group: str) -> list[object]:
    """All that a micro-step takes of a group."""
    made = micro_step(groups.bundles_of(group), step=0, number=0, version=0)
    return [msgspec.json.encode(made), groups.group(group).members]


def test_a_turn_that_is_told_late_is_in_the_rows_of_a_group_that_no_step_assigned(
    tmp_path: Path,
) -> None:
    made = Prepared(tmp_path)
    turns = made.book.executions["e000000"].turns
    late = turns.pop()

    async def look() -> None:
        async with made.running():
            made.reader.may_read.set()
            made.groups.look_ahead(GROUPS[:1], ())
            await made.until(lambda: made.names == ["g00000"])
            turns.append(late)
            assert made.names == []
            await made.until(lambda: made.names == ["g00000"])
            made.groups.look_ahead((), {"g00000"})
            turns.pop()
            assert made.names == ["g00000"]

    asyncio.run(look())
    told = made.groups.group("g00000")
    assert [row.execution for row in told.rows] == ["e000000", "e000001"]


def test_a_thread_that_makes_rows_sees_nothing_of_what_is_told_meanwhile(
    tmp_path: Path,
) -> None:
    made = Prepared(tmp_path)

    async def look() -> None:
        async with made.running():
            made.groups.look_ahead(GROUPS[:1], ())
            await asyncio.sleep(0.01)
            made.book.executions["e000001"].turns.clear()
            made.reader.may_read.set()
            await made.until(lambda: made.num_wakes == 1)

    asyncio.run(look())
    assert [row.execution for row in made.groups.group(GROUPS[0]).rows] == ["e000000", "e000001"]


def test_a_fault_of_ours_in_the_thread_ends_whoever_runs_the_preparation(tmp_path: Path) -> None:
    made = Prepared(tmp_path)
    made.book.executions["e000000"].seed = -1
    made.reader.may_read.set()

    async def look() -> None:
        made.groups.look_ahead(GROUPS, ())
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(made.groups.prepare(made.wake))

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(look())
    assert isinstance(raised.value.exceptions[0], ValueError)
