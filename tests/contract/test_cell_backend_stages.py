"""Every cell backend as a pipeline: what is started ends once, is told once, and can be paused,
settled and reduced with others; wrong use is refused and costs nothing."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import CellBackend, MicroStep, Rendezvous, StepCounts
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.emulated import EmulatedCell, EmulatedSettings
from opengyre.trainer.prefix_groups import GroupStore
from opengyre.trainer.wire import add_counts
from opengyre.trajectory.bundles import Layout
from tests.stage_stories import Fleet, Kind, groups_of, micro_steps_of, old_objects_aside

MakeCell = Callable[[], CellBackend]
EMULATED = 0
NUM_CELLS = 3
KIND = Kind()
WORK = micro_steps_of(groups_of(KIND.family, Layout.TREE, is_tied=KIND.is_tied), 0)


class Cells:
    """The same few cells for every test: `fresh` are in training, with the initial weights."""

    def __init__(self, num_stages: int, folder: Path) -> None:
        self.fleet = Fleet(KIND, num_stages, folder)
        self.num_stages = max(1, num_stages)
        self.store = GroupStore()
        self.is_emulated = num_stages == EMULATED
        self.names = itertools.count()
        self._start = folder / "start"
        self._made: list[CellBackend] = []

    def fresh(self, num: int = 1) -> list[CellBackend]:
        while len(self._made) < num:
            self._made.append(self._emulated() if self.is_emulated else self.fleet.make())
        if not self._start.exists():
            self._start.mkdir()
            self._made[0].save(str(self._start))
        for cell in self._made[:num]:
            cell.leave_training()
            cell.restore(str(self._start))
            cell.enter_training()
        return self._made[:num]

    def _emulated(self) -> EmulatedCell:
        planes = {name: self.fleet.make_plane(name) for name in ("weights", "gradients")}
        return EmulatedCell(**planes, settings=EmulatedSettings(num_weights=16))

    def close(self) -> None:
        self.fleet.close()
        self.store.close()


@pytest.fixture(
    scope="module",
    params=[EMULATED, 1, 2, 4],
    ids=["emulated", "one stage", "two stages", "four stages"],
)
def cells(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cells]:
    with (
        old_objects_aside(),
        contextlib.closing(Cells(request.param, tmp_path_factory.mktemp("planes"))) as made,
    ):
        yield made


def _opened(cells: Cells, num: int = 1) -> list[CellBackend]:
    made = cells.fresh(num)
    for cell in made:
        assert cell.open_step(0, 0, None) == 0
    return made


def _bytes_of(cell: CellBackend) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in cell.parameters().items()}


def _after_update(cells: Cells, work: Sequence[MicroStep]) -> dict[str, bytes]:
    (cell,) = _opened(cells)
    for made in work:
        cell.run(made)
    cell.reduce([])
    assert cell.update(1).is_applied
    return _bytes_of(cell)


def test_what_is_started_is_told_once_and_what_is_computed_ends_in_order(cells: Cells) -> None:
    """A micro-step of counted paths alone has nothing to wait for."""
    (cell,) = _opened(cells)
    told: list[int] = []
    for num_started, made in enumerate(WORK, start=1):
        told += cell.run(made).micro_steps
        assert num_started - len(told) < cells.num_stages
    while ended := cell.finish_one().micro_steps:
        assert len(ended) == 1
        told += ended
    assert sorted(told) == list(range(len(WORK)))
    computed = [number for number in told if WORK[number].num_trained_tokens]
    assert computed == sorted(computed)
    assert len(computed) < len(told)
    assert cell.finish_one() == StepCounts()


def test_counts_of_parts_add_up_to_those_of_the_whole(cells: Cells) -> None:
    (cell,) = _opened(cells)
    total = StepCounts()
    for place, made in enumerate(WORK):
        total = add_counts(total, cell.run(made))
        if place % 3 == 0:
            total = add_counts(total, cell.finish_one())
    while (ended := cell.finish_one()).micro_steps:
        total = add_counts(total, ended)
    settled, _ = cell.settle(0)
    assert sorted(settled.micro_steps) == sorted(total.micro_steps)
    assert settled.num_tokens == total.num_tokens == sum(one.num_trained_tokens for one in WORK)
    assert settled.num_executions == pytest.approx(total.num_executions, rel=1e-12)
    assert settled.loss_sum == pytest.approx(total.loss_sum, rel=1e-9, abs=1e-12)
    assert settled.num_clipped == total.num_clipped


def test_finishing_when_nothing_is_in_flight_does_nothing(cells: Cells) -> None:
    (cell,) = cells.fresh()
    assert cell.finish_one() == StepCounts()
    cell.open_step(0, 0, None)
    assert cell.finish_one() == StepCounts()
    cell.run(WORK[0])
    for _ in range(cells.num_stages):
        cell.finish_one()
    assert cell.finish_one() == StepCounts()
    assert cell.settle(0)[0].micro_steps == [0]
    assert cell.finish_one() == StepCounts()


def test_settling_ends_what_is_in_flight_and_can_be_repeated(cells: Cells) -> None:
    (cell,) = _opened(cells)
    assert cell.settle(0)[0] == StepCounts()
    for made in WORK[:5]:
        cell.run(made)
    counts, times = cell.settle(0)
    assert sorted(counts.micro_steps) == [0, 1, 2, 3, 4]
    assert len(times) == cells.num_stages
    assert all(min(msgspec.structs.astuple(one)) >= 0 for one in times)
    assert cell.settle(0)[0] == counts
    cell.run(WORK[5])
    more, later = cell.settle(0)
    assert sorted(more.micro_steps) == [0, 1, 2, 3, 4, 5]
    pairs = list(zip(times, later, strict=True))
    assert all(a.forward_s <= b.forward_s and a.backward_s <= b.backward_s for a, b in pairs)
    assert cells.is_emulated or all(a.backward_s < b.backward_s for a, b in pairs)


def test_pauses_do_not_change_the_update(cells: Cells) -> None:
    smooth = _after_update(cells, WORK)
    (cell,) = _opened(cells)
    for place, made in enumerate(WORK):
        cell.run(made)
        for _ in range(place % (cells.num_stages + 2)):
            cell.finish_one()
        if place % 4 == 3:
            cell.settle(0)
    cell.reduce([])
    cell.update(1)
    assert _bytes_of(cell) == smooth


def test_weights_are_those_of_the_version_while_work_is_in_flight(cells: Cells) -> None:
    (cell,) = cells.fresh()
    before = _bytes_of(cell)
    cell.open_step(0, 0, None)
    for made in WORK[:5]:
        cell.run(made)
        assert _bytes_of(cell) == before
    cell.expose_gradients(0)
    cell.reduce([])
    assert _bytes_of(cell) == before


def test_what_ends_while_something_else_is_asked_is_told_all_the_same(cells: Cells) -> None:
    """Whoever leases micro-steps waits for each number; sums that have it must not keep it."""
    (cell,) = _opened(cells)
    told = [number for made in WORK[:5] for number in cell.run(made).micro_steps]
    cell.parameters()
    cell.expose_weights(0)
    told += cell.run(WORK[5]).micro_steps
    while ended := cell.finish_one().micro_steps:
        told += ended
    assert sorted(told) == [0, 1, 2, 3, 4, 5]


WRONG = {
    "another step": (BoundaryError, lambda cell: cell.run(_changed(WORK[6], step=1))),
    "another version": (BoundaryError, lambda cell: cell.run(_changed(WORK[6], version=1))),
    "a number that is in flight": (InvariantError, lambda cell: cell.run(WORK[3])),
    "a number that has ended": (InvariantError, lambda cell: cell.run(WORK[0])),
    "settling another step": (BoundaryError, lambda cell: cell.settle(1)),
    "exposing another step": (BoundaryError, lambda cell: cell.expose_gradients(1)),
    "an update before the reduction": (InvariantError, lambda cell: cell.update(1)),
    "reducing another step": (
        BoundaryError,
        lambda cell: cell.reduce([(_other_step(cell), StepCounts())]),
    ),
    "reducing another step together": (
        BoundaryError,
        lambda cell: cell.reduce_together(
            1, Rendezvous(store="127.0.0.1:1", name="none", rank=0, size=1), []
        ),
    ),
    "reducing a micro-step twice": (
        InvariantError,
        lambda cell: cell.reduce([cell.expose_gradients(0)]),
    ),
}


def _changed(made: MicroStep, **changes: int) -> MicroStep:
    return msgspec.structs.replace(made, **changes)


def _other_step(cell: CellBackend) -> object:
    return msgspec.structs.replace(cell.expose_weights(0), version=1)


@pytest.mark.parametrize("title", list(WRONG))
def test_wrong_use_is_refused_and_the_step_goes_on(cells: Cells, title: str) -> None:
    want = _after_update(cells, WORK)
    (cell,) = _opened(cells)
    for made in WORK[:4]:
        cell.run(made)
    error, use = WRONG[title]
    with pytest.raises(error):
        use(cell)
    for made in WORK[4:]:
        cell.run(made)
    cell.reduce([])
    assert cell.update(1).is_applied
    assert _bytes_of(cell) == want


def test_an_update_to_any_but_the_next_version_is_refused(cells: Cells) -> None:
    if cells.is_emulated:
        pytest.skip("an emulated cell takes any version")
    (cell,) = _opened(cells)
    before = _bytes_of(cell)
    cell.run(WORK[0])
    cell.reduce([])
    with pytest.raises(InvariantError):
        cell.update(2)
    assert _bytes_of(cell) == before


def test_an_update_uses_up_the_reduction(cells: Cells) -> None:
    (cell,) = _opened(cells)
    cell.run(WORK[0])
    cell.reduce([])
    cell.update(1)
    with pytest.raises(InvariantError):
        cell.update(2)
    with pytest.raises(BoundaryError):
        cell.run(WORK[1])


def test_a_reduction_of_an_earlier_step_is_forgotten(cells: Cells) -> None:
    (cell,) = _opened(cells)
    cell.run(WORK[0])
    cell.reduce([])
    cell.open_step(0, 0, None)
    cell.run(WORK[1])
    with pytest.raises(InvariantError):
        cell.update(1)


@pytest.fixture
def grouped(cells: Cells) -> Cells:
    if cells.is_emulated:
        pytest.skip("an emulated cell is in no group")
    return cells


def _together(
    cells: Cells, made: Sequence[CellBackend], *, name: str, absent: Sequence[int] = ()
) -> list[StepCounts | BoundaryError]:
    """What each member gets; those `absent` do not come."""
    counts = [cell.settle(0)[0] for cell in made]

    def reduce(rank: int) -> StepCounts | BoundaryError:
        place = Rendezvous(store=cells.store.address, name=name, rank=rank, size=len(made))
        others = [one for other, one in enumerate(counts) if other != rank]
        try:
            return made[rank].reduce_together(0, place, others)
        except BoundaryError as error:
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(reduce, [one for one in range(len(made)) if one not in absent]))


@pytest.mark.parametrize("num_cells", [1, 2, 3])
def test_a_reduction_together_is_the_star(grouped: Cells, num_cells: int) -> None:
    after = []
    for is_together in (False, True):
        made = _opened(grouped, num_cells)
        for place, one in enumerate(WORK):
            made[place % num_cells].run(one)
        if is_together:
            told = _together(grouped, made, name=f"all{num_cells}")
        else:
            told = [made[0].reduce([cell.expose_gradients(0) for cell in made[1:]])]
        for one in told:
            assert isinstance(one, StepCounts)
            assert sorted(one.micro_steps) == list(range(len(WORK)))
        assert made[0].update(1).is_applied
        after.append(made[0].parameters())
    star, together = after
    assert all(abs(star[name] - together[name]).max() < 1e-12 for name in star)


def test_a_reduction_without_a_member_fails_for_all_and_the_star_finishes(grouped: Cells) -> None:
    made = _opened(grouped, NUM_CELLS)
    for place, one in enumerate(WORK):
        made[place % NUM_CELLS].run(one)
    told = _together(grouped, made, name="one is gone", absent=[2])
    assert len(told) == 2
    for one in told:
        assert isinstance(one, BoundaryError)
        assert one.retryable
    made[0].reduce([cell.expose_gradients(0) for cell in made[1:]])
    assert made[0].update(1).is_applied
    late = made[0].parameters()
    made = _opened(grouped, NUM_CELLS)
    for place, one in enumerate(WORK):
        made[place % NUM_CELLS].run(one)
    made[0].reduce([cell.expose_gradients(0) for cell in made[1:]])
    made[0].update(1)
    prompt = made[0].parameters()
    assert all(late[name].tobytes() == prompt[name].tobytes() for name in prompt)


def test_only_the_core_holds_what_was_added_up_and_only_until_its_update(grouped: Cells) -> None:
    made = _opened(grouped, NUM_CELLS)
    for place, one in enumerate(WORK):
        made[place % NUM_CELLS].run(one)
    before = [cell.held().gradients_bytes for cell in made]
    _together(grouped, made, name="who holds it")
    after = [cell.held().gradients_bytes for cell in made]
    assert after == [2 * before[0], *before[1:]]
    made[0].update(1)
    assert made[0].held().gradients_bytes == before[0] > 0
    for cell in made:
        cell.leave_training()
        assert cell.held().gradients_bytes == 0
