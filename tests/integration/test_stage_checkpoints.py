"""What P stages expose and save is the whole model's, and any other number of stages goes on
from it bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from opengyre.seams.cells import CellBackend
from opengyre.trainer.checkpoint import names_in, read_named
from opengyre.trajectory.bundles import Layout
from opengyre.transport.snapshots import pull_named
from tests.plain_training import Weights, worst_relative
from tests.stage_stories import (
    Fleet,
    Groups,
    Kind,
    are_ends_equal,
    groups_of,
    model,
    names_of,
    old_objects_aside,
    reference,
    step_alone,
)

KINDS = [Kind(), Kind(family="llama", is_tied=False)]
NUM_STAGES = (1, 2, 3, 4)
NUM_UPDATES = 20


class Cells:
    """A core of each number of stages, in training."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.fleets = {num: Fleet(kind, num, folder / str(num)) for num in NUM_STAGES}

    @property
    def groups(self) -> Groups:
        return groups_of(self.kind.family, Layout.TREE, is_tied=self.kind.is_tied)

    def core(self, num_stages: int) -> CellBackend:
        core = self.fleets[num_stages].restored_core()
        core.enter_training()
        return core

    def close(self) -> None:
        for fleet in self.fleets.values():
            fleet.close()


@pytest.fixture(scope="module", params=KINDS, ids=str)
def cells(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cells]:
    folder = tmp_path_factory.mktemp("planes")
    for num in NUM_STAGES:
        (folder / str(num)).mkdir()
    with old_objects_aside():
        made = Cells(request.param, folder)
        yield made
        made.close()


def _saved(cell: CellBackend, folder: Path) -> Weights:
    """All that `cell` saves, read by name."""
    folder.mkdir()
    cell.save(str(folder))
    return {
        f"{kind}/{name}": tensor.numpy()
        for kind in ("model", "optimizer")
        for name, tensor in read_named(folder, kind, names_in(folder, kind)).items()
    }


def _are_equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        array.dtype == second[name].dtype and array.tobytes() == second[name].tobytes()
        for name, array in first.items()
    )


@pytest.mark.parametrize("num_stages", NUM_STAGES[1:])
def test_a_snapshot_in_parts_is_that_of_the_whole_model(cells: Cells, num_stages: int) -> None:
    whole, parts = cells.core(1), cells.core(num_stages)
    for step in range(2):
        ours, theirs = parts.expose_weights(step), whole.expose_weights(step)
        assert len(ours.parts) == num_stages
        assert {spec.name for spec in ours.tensors} == {spec.name for spec in theirs.tensors}
        assert worst_relative(parts.parameters(), whole.parameters()) < 1e-9
        whole.load(ours)
        assert whole.expose_weights(step).checksum == ours.checksum
        for cell in (whole, parts):
            assert step_alone(cell, cells.groups, step).is_applied


@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_an_engine_reads_all_its_weights_from_the_parts(cells: Cells, num_stages: int) -> None:
    core = cells.core(num_stages)
    step_alone(core, cells.groups, 0)
    engine = dict(model(cells.kind).named_parameters())
    into = {name: one.detach().numpy() for name, one in engine.items()}
    plane = cells.fleets[num_stages].make_plane("engine")
    assert pull_named(plane, core.expose_weights(1), into) == 1
    assert _are_equal(into, core.parameters())
    assert all(np.array_equal(into[name], one.detach().numpy()) for name, one in engine.items())


@pytest.mark.parametrize("num_before", NUM_STAGES)
def test_any_number_of_stages_goes_on_from_what_any_other_saved(
    cells: Cells, num_before: int, tmp_path: Path
) -> None:
    first = cells.core(num_before)
    step_alone(first, cells.groups, 0)
    saved = _saved(first, tmp_path / "first")
    for num_after in NUM_STAGES:
        cell = cells.core(num_after)
        cell.restore(str(tmp_path / "first"))
        assert _are_equal(_saved(cell, tmp_path / f"again{num_after}"), saved)
        assert are_ends_equal(cell.expose_weights(1)) or not cells.kind.is_tied
        norms = step_alone(cell, cells.groups, 1)
        want = reference(cells.kind)[1]
        assert norms.grad_norm == pytest.approx(want.grad_norm, rel=1e-9)
        assert worst_relative(cell.parameters(), want.weights) < 1e-9
        if num_after == num_before:
            first.restore(str(tmp_path / f"again{num_after}"))
            assert _are_equal(_saved(first, tmp_path / "back"), saved)


def test_a_restored_cell_forgets_the_moments_it_had(cells: Cells, tmp_path: Path) -> None:
    cell = cells.core(2)
    fresh = _saved(cell, tmp_path / "fresh")
    step_alone(cell, cells.groups, 0)
    cell.restore(str(tmp_path / "fresh"))
    assert _are_equal(_saved(cell, tmp_path / "again"), fresh)
    step_alone(cell, cells.groups, 0)
    assert worst_relative(cell.parameters(), reference(cells.kind)[0].weights) < 1e-9


@pytest.mark.parametrize("num_stages", [2, 4])
def test_both_ends_of_a_tied_weight_stay_equal_over_many_updates(
    cells: Cells, num_stages: int, tmp_path: Path
) -> None:
    core = cells.core(num_stages)
    first, group = core.parameters(), {"g0": cells.groups["g0"], "g1": cells.groups["g1"]}
    for version in range(NUM_UPDATES):
        few = {name: group.get(name, ()) for name in names_of(0)}
        assert step_alone(core, few, 0, version=version).is_applied
        snapshot = core.expose_weights(version + 1)
        assert are_ends_equal(snapshot) is cells.kind.is_tied
        if version == NUM_UPDATES // 2:
            _saved(core, tmp_path / "half")
            core.restore(str(tmp_path / "half"))
            assert are_ends_equal(core.expose_weights(version + 1)) is cells.kind.is_tied
    assert worst_relative(core.parameters(), first) > 0.01
