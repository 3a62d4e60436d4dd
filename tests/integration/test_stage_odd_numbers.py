"""P20 over pipeline stages: a number that is not finite is named, and no stage applies the step.

Afterwards the same step, with whole numbers, gives what it would have given.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from opengyre.seams.cells import MicroStep, Rendezvous, StepCounts, UpdateNorms
from opengyre.seams.weights import Snapshot
from opengyre.trainer.embedded import EmbeddedCell
from opengyre.trajectory.bundles import Layout
from opengyre.transport.snapshots import pull_named
from tests.plain_training import Weights, logprobs_alone, worst_relative
from tests.stage_stories import (
    TEMPERATURE,
    Fleet,
    Groups,
    Kind,
    groups_of,
    micro_steps_of,
    model,
    old_objects_aside,
    reference,
    step_alone,
)

KIND = Kind(is_tied=False)
NUM_STAGES = (1, 2, 4)
ODD_ONE = 3
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, MIDDLE = "model.norm.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=NUM_STAGES, ids=lambda num: f"{num} stages")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with old_objects_aside():
        made = Fleet(KIND, request.param, tmp_path_factory.mktemp("planes"))
        yield made
        made.close()


@pytest.fixture
def core(fleet: Fleet) -> EmbeddedCell:
    made = fleet.restored_core()
    made.enter_training()
    return made


def _groups() -> Groups:
    return groups_of(KIND.family, Layout.TREE, is_tied=KIND.is_tied)


def _work() -> list[MicroStep]:
    return [one for one in micro_steps_of(_groups(), 0) if one.num_trained_tokens]


def _bytes_of(cell: EmbeddedCell) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in cell.parameters().items()}


def _with_logprob(made: MicroStep) -> MicroStep:
    logprobs = list(made.logprobs)
    logprobs[made.paths[0].trained[0][0]] = math.nan
    return msgspec.structs.replace(made, logprobs=logprobs)


def _with_advantage(made: MicroStep, advantage: float) -> MicroStep:
    paths = [msgspec.structs.replace(path, advantage=advantage) for path in made.paths]
    return msgspec.structs.replace(made, paths=paths)


SPOILT = {
    "a logprob": _with_logprob,
    "an advantage": lambda made: _with_advantage(made, math.nan),
    "an infinite advantage": lambda made: _with_advantage(made, math.inf),
}


def _assert_refused(norms: UpdateNorms, made: MicroStep, core: EmbeddedCell) -> None:
    """The reason names weight, group and micro-step."""
    assert not norms.is_applied
    words = norms.reason.replace(",", " ").split()
    assert set(words) & set(core.parameters()), norms.reason
    assert str(made.number) in words
    assert all(path.group in words for path in made.paths), norms.reason


def _assert_goes_on(core: EmbeddedCell) -> None:
    for step, want in enumerate(reference(KIND)):
        assert step_alone(core, _groups(), step).is_applied
        assert worst_relative(core.parameters(), want.weights) < 1e-9


@pytest.mark.parametrize("title", list(SPOILT))
def test_an_odd_number_in_one_group_is_named_and_no_stage_applies_it(
    core: EmbeddedCell, title: str
) -> None:
    before, work = _bytes_of(core), _work()
    work[ODD_ONE] = SPOILT[title](work[ODD_ONE])
    core.open_step(0, 0, None)
    for made in work:
        core.run(made)
    core.reduce([])
    _assert_refused(core.update(1), work[ODD_ONE], core)
    assert _bytes_of(core) == before
    _assert_goes_on(core)


@pytest.mark.parametrize("is_together", [False, True], ids=["star", "together"])
def test_an_odd_number_in_a_satellite_is_named_at_the_core(
    fleet: Fleet, core: EmbeddedCell, is_together: bool
) -> None:
    before, work, satellite = _bytes_of(core), _work(), fleet.cell(1)
    work[ODD_ONE] = _with_logprob(work[ODD_ONE])
    satellite.enter_training()
    core.open_step(0, 0, None)
    satellite.open_step(0, 0, core.expose_weights(0))
    for made in work:
        (satellite if made.number % 2 == work[ODD_ONE].number % 2 else core).run(made)
    if is_together:
        _together(fleet, [core, satellite])
    else:
        core.reduce([satellite.expose_gradients(0)])
    _assert_refused(core.update(1), work[ODD_ONE], core)
    assert _bytes_of(core) == before
    satellite.leave_training()
    _assert_goes_on(core)


def _together(fleet: Fleet, cells: Sequence[EmbeddedCell]) -> StepCounts:
    counts = [cell.settle(0)[0] for cell in cells]

    def reduce(rank: int) -> StepCounts:
        place = Rendezvous(store=fleet.store.address, name="odd", rank=rank, size=len(cells))
        others = [told for other, told in enumerate(counts) if other != rank]
        return cells[rank].reduce_together(0, place, others)

    with ThreadPoolExecutor(len(cells)) as pool:
        return next(iter(pool.map(reduce, range(len(cells)))))


@pytest.mark.parametrize("name", [EMBEDDING, MIDDLE, NORM, HEAD])
def test_an_odd_weight_is_never_trained(fleet: Fleet, core: EmbeddedCell, name: str) -> None:
    good = core.expose_weights(0, pinned=[0])
    spoilt = core.parameters()
    spoilt[name].flat[-1] = math.nan
    plane = fleet.make_plane("spoilt")
    core.load(Snapshot(version=0, parts=[plane.expose(spoilt, 0)]))
    before = _bytes_of(core)
    work = _work()
    if name == EMBEDDING:
        last = spoilt[name].shape[0] - 1
        work = [one for one in work if last in one.token_ids]
    core.open_step(0, 0, None)
    for made in work:
        core.run(made)
    core.reduce([])
    norms = core.update(1)
    _assert_refused(norms, work[0], core)
    assert _bytes_of(core) == before
    core.load(good)
    _assert_goes_on(core)


def _exposed_again(
    fleet: Fleet, core: EmbeddedCell, shared: Snapshot, part: int, value: float
) -> Snapshot:
    """`shared` with one number of one stage's part replaced."""
    arrays = {
        spec.name: np.empty(spec.shape, dtype=spec.dtype) for spec in shared.parts[part].tensors
    }
    plane = fleet.make_plane("spoilt")
    pull_named(plane, shared, arrays)
    next(iter(arrays.values())).flat[-1] = value
    parts = list(shared.parts)
    parts[part] = plane.expose(arrays, shared.version)
    return Snapshot(version=shared.version, parts=parts)


@pytest.mark.parametrize("values", [(math.inf, 0.0), (math.nan, 0.0), (1.7e308, 1.7e308)], ids=str)
def test_what_one_stage_alone_cannot_sum_no_stage_applies(
    fleet: Fleet, core: EmbeddedCell, values: tuple[float, float]
) -> None:
    """Sums of two satellites, spoilt on the way; the last case's are finite, each by itself."""
    before, work = _bytes_of(core), _work()
    cells = [core, fleet.cell(1), fleet.cell(2)]
    snapshot = core.expose_weights(0)
    core.open_step(0, 0, None)
    for satellite in cells[1:]:
        satellite.enter_training()
        satellite.open_step(0, 0, snapshot)
    for made in work:
        cells[made.number % 3].run(made)
    parts = [satellite.expose_gradients(0) for satellite in cells[1:]]
    for stage in range(fleet.num_stages):
        spoilt = [
            (_exposed_again(fleet, core, shared, stage, value), counts)
            for (shared, counts), value in zip(parts, values, strict=True)
        ]
        core.reduce(spoilt)
        norms = core.update(1)
        assert not norms.is_applied
        assert set(norms.reason.split()) & set(before)
        assert _bytes_of(core) == before
        core.open_step(0, 0, None)
        for made in work:
            if made.number % 3 == 0:
                core.run(made)
    _assert_goes_on(core)


def _edged(fleet: Fleet, core: EmbeddedCell) -> tuple[Weights, MicroStep]:
    """Weights whose logits are as they were, with a gradient near the largest float64 on the last
    norm alone; and the micro-step that brings it."""
    weights = core.parameters()
    weights[NORM] *= 1e-300
    weights[HEAD] *= 1e300
    plane = fleet.make_plane("edged")
    core.load(Snapshot(version=0, parts=[plane.expose(weights, 0)]))
    made = next(one for one in _work() if len(one.paths) == 1)
    module: Any = model(KIND)
    module.load_state_dict({name: torch.from_numpy(one) for name, one in weights.items()})
    path = made.paths[0]
    line = [i for a, b in path.pieces for i in range(a, b)]
    trained = [line.index(i) - 1 for a, b in path.trained for i in range(a, b)]
    told = logprobs_alone(module, [made.token_ids[i] for i in line], TEMPERATURE)[trained]
    (-told.sum() / path.num_execution_tokens).backward()
    largest = float(module.model.norm.weight.grad.abs().max())
    logprobs = list(made.logprobs)
    for place, value in zip((i for a, b in path.trained for i in range(a, b)), told, strict=True):
        logprobs[place] = float(value.detach())
    made = msgspec.structs.replace(made, logprobs=logprobs)
    return weights, _with_advantage(made, 1.2e308 / largest)


def test_finite_gradients_whose_sum_is_not_are_found_where_they_overflow(
    fleet: Fleet, core: EmbeddedCell
) -> None:
    start = core.expose_weights(0, pinned=[0])
    _, made = _edged(fleet, core)
    before = _bytes_of(core)
    core.open_step(0, 0, None)
    for number in range(2):
        core.run(msgspec.structs.replace(made, number=number))
    core.reduce([])
    norms = core.update(1)
    assert not norms.is_applied
    assert NORM in norms.reason.split()
    assert _bytes_of(core) == before
    core.load(start)
    _assert_goes_on(core)


def test_a_norm_that_overflows_is_clipped_or_refused_but_never_told_as_applied(
    fleet: Fleet, core: EmbeddedCell
) -> None:
    """Every gradient is finite, the sum of their squares is not."""
    start = core.expose_weights(0, pinned=[0])
    _, made = _edged(fleet, core)
    before = core.parameters()
    core.open_step(0, 0, None)
    core.run(made)
    assert core.reduce([]).odd == ""
    norms = core.update(1)
    after = core.parameters()
    assert all(np.isfinite(array).all() for array in after.values())
    if norms.is_applied:
        assert math.isfinite(norms.grad_norm)
        assert any((after[name] != before[name]).any() for name in before)
    else:
        assert all((after[name] == before[name]).all() for name in before)
        assert norms.reason
    core.load(start)
