"""The books: levels, buckets, joins, lanes."""

import pytest

from opengyre.control.ids import EngineId
from opengyre.simulate.accounts import Account, Books
from opengyre.simulate.result import Bucket, Mode, Stretch


def make_books(*, leaving_slots: int | None = 10, max_stretches: int = 100) -> Books:
    """Two cells of 4 devices and 10 slots, one standalone engine of 2 devices and 5 slots."""
    cells = [
        Account(engine=EngineId(f"c{cell}"), is_cell=True, devices=4, slots=10) for cell in (0, 1)
    ]
    alone = Account(engine=EngineId("s0"), is_cell=False, devices=2, slots=5)
    books = Books([*cells, alone], leaving_slots=leaving_slots, max_stretches=max_stretches)
    for account in books.by_engine.values():
        books.change_mode(account, Mode.ROLLOUT, 0.0)
    return books


def booked(books: Books) -> dict[Bucket, float]:
    return {bucket: value for bucket, value in books.seconds_by_bucket.items() if value}


def test_used_slots_generate_and_free_ones_wait_for_supply_or_coverage() -> None:
    books = make_books()
    books.now.waterlevel = 15
    books.change_used(books.by_engine[EngineId("c0")], 5, 0.0)
    books.settle(10.0)
    assert booked(books) == {Bucket.GENERATING: 20.0, Bucket.WAITING_FOR_SUPPLY: 80.0}
    books.now.waterlevel = 16
    books.settle(20.0)
    assert booked(books)[Bucket.WAITING_FOR_COVERAGE] == 80.0


def test_free_slots_that_no_role_change_can_use_wait_for_data() -> None:
    books = make_books(leaving_slots=None)
    books.settle(1.0)
    assert booked(books) == {Bucket.WAITING_FOR_DATA: 10.0}
    elastic = make_books()
    for cell in ("c0", "c1"):
        elastic.change_mode(elastic.by_engine[EngineId(cell)], Mode.TRAINING, 0.0)
    elastic.set_working(8, 0.0)
    elastic.settle(1.0)
    assert booked(elastic) == {Bucket.TRAINING: 8.0, Bucket.WAITING_FOR_DATA: 2.0}
    assert elastic.slack == 0.0


def test_after_the_last_dispatch_and_the_last_execution_free_slots_are_idle_at_the_end() -> None:
    books = make_books()
    books.now.is_all_dispatched, books.now.waterlevel = True, 1
    books.settle(1.0)
    books.now.waterlevel = 0
    books.settle(2.0)
    assert booked(books) == {Bucket.WAITING_FOR_SUPPLY: 10.0, Bucket.IDLE_AT_END: 10.0}


def test_a_cell_in_training_works_joins_saves_or_waits() -> None:
    books = make_books()
    core, cell = (books.by_engine[EngineId(name)] for name in ("c0", "c1"))
    books.change_mode(core, Mode.TRAINING, 0.0)
    books.change_mode(cell, Mode.TRAINING, 0.0)
    books.set_working(4, 0.0)
    books.begin_join(cell, 0.0)
    books.end_join(cell, 3.0)
    books.set_saving(4, 5.0)
    books.set_working(0, 5.0)
    books.settle(6.0)
    seconds = books.seconds_by_bucket
    assert seconds[Bucket.TRAINING] == 20.0
    assert seconds[Bucket.MOVING] == 12.0
    assert seconds[Bucket.PUBLISHING] == 4.0
    assert books.slack == pytest.approx((2 * 4 + 4) / 48.0)


def test_a_cell_that_dies_while_it_joins_is_lost_and_joins_no_more() -> None:
    books = make_books()
    cell = books.by_engine[EngineId("c1")]
    books.change_mode(cell, Mode.TRAINING, 0.0)
    books.begin_join(cell, 0.0)
    books.begin_join(cell, 1.0)
    books.change_mode(cell, Mode.LOST, 2.0)
    books.end_join(cell, 3.0)
    books.settle(5.0)
    assert booked(books)[Bucket.MOVING] == 8.0
    assert booked(books)[Bucket.LOST] == 12.0
    assert sum(books.seconds_by_bucket.values()) == 50.0
    assert books.now.joining == 0


def test_a_publishing_engine_publishes_with_all_its_devices_whatever_lives_on_it() -> None:
    books = make_books()
    engine = books.by_engine[EngineId("s0")]
    books.change_used(engine, 5, 0.0)
    books.change_mode(engine, Mode.PUBLISHING, 0.0)
    books.change_used(engine, -2, 1.0)
    books.change_mode(engine, Mode.ROLLOUT, 2.0)
    books.settle(3.0)
    assert booked(books)[Bucket.PUBLISHING] == 4.0
    assert booked(books)[Bucket.GENERATING] == pytest.approx(3 * 2 / 5)


def test_stretches_of_one_mode_are_one_and_those_without_length_are_none() -> None:
    books = make_books()
    cell = books.by_engine[EngineId("c1")]
    for mode, now_s in (
        (Mode.MOVING, 1.0),
        (Mode.TRAINING, 2.0),
        (Mode.MOVING, 2.0),
        (Mode.ROLLOUT, 4.0),
        (Mode.ROLLOUT, 5.0),
    ):
        books.change_mode(cell, mode, now_s)
    books.close(6.0)
    assert [one for one in books.lanes if one.engine == "c1"] == [
        Stretch(engine=EngineId("c1"), mode=Mode.ROLLOUT, from_s=0.0, to_s=1.0),
        Stretch(engine=EngineId("c1"), mode=Mode.MOVING, from_s=1.0, to_s=4.0),
        Stretch(engine=EngineId("c1"), mode=Mode.ROLLOUT, from_s=4.0, to_s=6.0),
    ]


def test_lanes_are_bounded_and_what_is_left_out_is_counted() -> None:
    books = make_books(max_stretches=3)
    cell = books.by_engine[EngineId("c1")]
    for number in range(1, 7):
        books.change_mode(cell, (Mode.ROLLOUT, Mode.MOVING)[number % 2], float(number))
    books.close(10.0)
    assert (len(books.lanes), books.num_left_out) == (3, 3 + 3)
