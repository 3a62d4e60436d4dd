from opengyre.trajectory.groups import Row
from opengyre.trajectory.packing import Filling, pack
from opengyre.trajectory.rows import Path


def _row(name: str, num_tokens: int, *, is_counted_only: bool = False) -> Row:
    path = Path(
        turns=(name,),
        token_ids=list(range(num_tokens)),
        mask=[0] + [1] * (num_tokens - 1),
        logprobs=[0.0] + [-0.5] * (num_tokens - 1),
        versions=[0] + [3] * (num_tokens - 1),
    )
    return Row(
        group="g",
        execution=name,
        path=path,
        advantage=1.0,
        num_path_tokens=num_tokens - 1,
        num_execution_tokens=num_tokens - 1,
        is_counted_only=is_counted_only,
    )


def test_positions_start_at_zero_in_each_segment() -> None:
    packed = pack([_row("a", 3), _row("b", 2)])
    assert packed.token_ids == [0, 1, 2, 0, 1]
    assert packed.position_ids == [0, 1, 2, 0, 1]
    assert packed.mask == [0, 1, 1, 0, 1]
    assert packed.versions == [0, 3, 3, 0, 3]
    assert [(one.row.execution, one.start, one.end) for one in packed.segments] == [
        ("a", 0, 3),
        ("b", 3, 5),
    ]


def test_a_counted_only_row_is_an_empty_segment() -> None:
    packed = pack([_row("a", 3, is_counted_only=True), _row("b", 2)])
    assert [(one.start, one.end) for one in packed.segments] == [(0, 0), (0, 2)]
    assert packed.token_ids == [0, 1]


def test_rows_are_taken_until_the_budget_is_full_and_a_long_row_goes_alone() -> None:
    filling = Filling(budget_tokens=5)
    assert filling.has_room_for(_row("long", 9))
    filling.add(_row("a", 3))
    assert filling.has_room_for(_row("b", 2))
    assert not filling.has_room_for(_row("c", 3))
    assert filling.has_room_for(_row("d", 99, is_counted_only=True))
