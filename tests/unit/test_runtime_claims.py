"""What a cell has in hand of one step."""

from opengyre.runtime.claims import WorkInHand
from tests.training_rows import line_row, micro_step_of


def test_work_that_overtakes_ends_where_it_stands_and_times_add_up() -> None:
    now = [0.0]
    work = WorkInHand(lambda: now[0])
    assert not work
    for number in range(3):
        now[0] = float(number)
        work.start(micro_step_of(line_row("e1", 4), number=number))
    now[0] = 2.5
    ended = work.end([2])
    now[0] = 4.0
    ended += work.end([0, 1])
    assert [(one.number, run_s) for one, run_s in ended] == [(2, 0.5), (0, 1.5), (1, 0.0)]
    assert not work
