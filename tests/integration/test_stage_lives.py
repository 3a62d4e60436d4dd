"""A cell of P stages is taken away from its work at any depth of its pipeline, and begins anew.

What was in flight leaves nothing behind: not in sums, not in counts, not in memory.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from opengyre.seams.cells import CellBackend, MicroStep
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Snapshot
from opengyre.trajectory.bundles import Layout
from tests.plain_training import worst_relative
from tests.stage_stories import (
    KL,
    Fleet,
    Groups,
    Kind,
    groups_of,
    micro_steps_of,
    old_objects_aside,
    reference,
    step_alone,
)

KIND = Kind()
NUM_STAGES = (1, 2, 4)
NUM_CYCLES = 3


def _groups() -> Groups:
    return groups_of(KIND.family, Layout.TREE, is_tied=KIND.is_tied)


@pytest.fixture(scope="module", params=NUM_STAGES, ids=lambda num: f"{num} stages")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with old_objects_aside():
        made = Fleet(KIND, request.param, tmp_path_factory.mktemp("planes"))
        yield made
        made.close()


def _begin(cell: CellBackend, num_micro_steps: int, *, num_ended: int = 0) -> None:
    """The first micro-steps of the first step go in; `num_ended` times the oldest comes out."""
    cell.open_step(0, 0, None)
    for made in micro_steps_of(_groups(), 0)[:num_micro_steps]:
        cell.run(made)
    for _ in range(num_ended):
        cell.finish_one()


def _drop(cell: CellBackend) -> None:
    cell.drop_sums()


def _drop_twice(cell: CellBackend) -> None:
    cell.drop_sums()
    cell.drop_sums()


def _open_again(cell: CellBackend) -> None:
    cell.open_step(0, 0, None)


def _switch(cell: CellBackend) -> None:
    cell.leave_training()
    cell.leave_training()
    cell.enter_training()


def _enter_again(cell: CellBackend) -> None:
    cell.enter_training()


ENDS = [_drop, _drop_twice, _open_again, _switch, _enter_again]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_step_left_at_any_depth_leaves_nothing_in_the_next(
    fleet: Fleet, end: Callable[[CellBackend], None]
) -> None:
    core = fleet.restored_core()
    core.enter_training()
    for depth in range(fleet.num_stages + 2):
        for num_ended in {0, depth // 2}:
            _begin(core, depth, num_ended=num_ended)
            end(core)
    for step, want in enumerate(reference(KIND)):
        norms = step_alone(core, _groups(), step)
        assert norms.loss == pytest.approx(want.loss, rel=1e-9)
        assert norms.grad_norm == pytest.approx(want.grad_norm, rel=1e-9)
        assert worst_relative(core.parameters(), want.weights) < 1e-9


def test_a_step_is_left_after_each_part_of_its_end(fleet: Fleet) -> None:
    core = fleet.restored_core()
    core.enter_training()
    _begin(core, 3)
    core.settle(0)
    core.open_step(0, 0, None)
    assert core.settle(0)[0].micro_steps == []
    _begin(core, 4)
    core.expose_gradients(0)
    core.drop_sums()
    _begin(core, 5)
    core.reduce([])
    core.leave_training()
    core.enter_training()
    for step, want in enumerate(reference(KIND)):
        assert step_alone(core, _groups(), step).is_applied
        assert worst_relative(core.parameters(), want.weights) < 1e-9


def test_a_load_or_a_restore_takes_a_cell_out_of_a_step_whole(fleet: Fleet, tmp_path: Path) -> None:
    core, other = fleet.restored_core(), fleet.cell(1)
    core.enter_training()
    core.save(str(tmp_path))
    start = core.expose_weights(0)
    other.enter_training()
    step_alone(other, _groups(), 0)
    other.open_step(1, 1, None)
    for made in micro_steps_of(_groups(), 1)[:3]:
        other.run(made)
    other.drop_sums()
    other.load(start)
    before = core.parameters()
    assert all((array == before[name]).all() for name, array in other.parameters().items())
    _begin(core, 3)
    core.drop_sums()
    core.restore(str(tmp_path))
    step_alone(core, _groups(), 0)
    assert worst_relative(core.parameters(), reference(KIND)[0].weights) < 1e-9
    other.leave_training()


def test_work_is_refused_between_two_lives(fleet: Fleet) -> None:
    core = fleet.restored_core()
    core.enter_training()
    made = micro_steps_of(_groups(), 0)
    for end in (core.drop_sums, core.leave_training):
        _begin(core, 2)
        end()
        with pytest.raises(BoundaryError, match="open is step"):
            core.run(made[0])
    with pytest.raises(BoundaryError, match="not in training"):
        core.open_step(0, 0, None)
    core.enter_training()
    step_alone(core, _groups(), 0)
    with pytest.raises(BoundaryError, match="open is step"):
        core.run(made[0])


def _num_live() -> tuple[int, int]:
    """Tensors of this process, and the numbers in them."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return len(found), sum(one.numel() for one in found)


@pytest.mark.parametrize("num_stages", NUM_STAGES)
@pytest.mark.parametrize("is_core", [True, False], ids=["core", "satellite"])
def test_no_life_of_a_cell_leaves_a_tensor_behind(
    tmp_path: Path, num_stages: int, is_core: bool
) -> None:
    """With a divergence, whose initial weights stay; with work in flight at the end of each."""
    with contextlib.closing(Fleet(Kind(kl_coefficient=KL), num_stages, tmp_path)) as fleet:
        cell = fleet.make(is_core=is_core)
        cell.enter_training()
        snapshot = cell.expose_weights(0)
        after = []
        for _ in range(NUM_CYCLES):
            _live_once(cell, None if is_core else snapshot)
            after.append(_num_live())
    assert after[1:] == after[:1] * (NUM_CYCLES - 1)


def _live_once(cell: CellBackend, snapshot: Snapshot | None) -> None:
    """One whole step and the beginning of another, from which the cell is taken away."""
    cell.enter_training()
    if snapshot is None:
        step_alone(cell, _groups(), 0)
    else:
        cell.open_step(0, 0, snapshot)
        _run_all(cell, micro_steps_of(_groups(), 0))
        cell.expose_gradients(0)
    cell.open_step(1, 1, None)
    _run_all(cell, micro_steps_of(_groups(), 1)[:6])
    cell.leave_training()


def _run_all(cell: CellBackend, work: list[MicroStep]) -> None:
    for made in work:
        cell.run(made)
