"""What the controller keeps of executions: held time, turns told once, launches."""

from pathlib import Path

import pytest

from opengyre.runtime.book import Book, Execution, HeldBy, HeldTime, turn_number
from opengyre.seams.records import SegmentRef, TurnRecord
from opengyre.seams.tasks import Task


class OneTask:
    num_tasks = 1

    def task_for_group(self, group_index: int) -> Task:
        return Task(
            name="one",
            folder=Path("/"),
            instruction="",
            workspace=None,
            tests=Path("/"),
            content_hash="",
        )


@pytest.fixture
def book() -> Book:
    found = Book(train=OneTask(), evaluation=None, seed=0)
    found.add_group("g00000", ("e000000",), burst=0, version=0)
    return found


def turn(number: int, attempt: int = 0) -> TurnRecord:
    return TurnRecord(
        turn=f"e000000.t{number}",
        execution="e000000",
        attempt=attempt,
        parent="",
        fork_reason="",
        role="main",
        num_kept_tokens=0,
        num_new_prompt_tokens=1,
        num_completion_tokens=0,
        spans=[],
        finish="stop",
        is_committed=True,
        ref=SegmentRef(segment=0, offset_bytes=number, crc32=0),
        received_s=0.0,
        first_token_s=0.0,
        ended_s=0.0,
        held_s=0.0,
        num_continuations=0,
    )


def numbers(one: Execution) -> list[int]:
    return [turn_number(told.turn) for told in one.turns]


def test_a_request_held_while_its_gateway_dies_is_held_once() -> None:
    held = HeldTime()
    held.set(HeldBy.REQUEST, True, 1.0)
    held.set(HeldBy.DEATH, True, 2.0)
    held.set(HeldBy.REQUEST, False, 2.0)
    assert held.total_s(4.0) == 3.0
    held.set(HeldBy.DEATH, False, 5.0)
    held.set(HeldBy.DEATH, False, 6.0)
    assert held.total_s(9.0) == 4.0


def test_a_turn_that_is_told_again_counts_once(book: Book) -> None:
    assert book.tell_turn(turn(1))
    assert not book.tell_turn(turn(1))
    assert book.tell_turn(turn(1, attempt=1))
    assert numbers(book.executions["e000000"]) == [1, 1]


def test_turn_numbers_go_on_over_launches_and_earlier_turns_are_dropped(book: Book) -> None:
    one = book.executions["e000000"]
    book.begin_launch(one)
    book.tell_turn(turn(1))
    book.tell_turn(turn(2))
    book.begin_launch(one)
    assert one.first_turn == 2
    assert not book.tell_turn(turn(2))
    assert book.tell_turn(turn(3))
    assert numbers(one) == [3]
