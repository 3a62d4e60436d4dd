"""One suite for every cell backend, over a real weight plane."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import CellBackend, MicroStep, Segment, StepCounts, TrainedPath
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import WeightPlane
from opengyre.trainer.emulated import EmulatedCell, EmulatedSettings
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.stage import StageSettings
from opengyre.trainer.wire import add_counts
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.stage_threads import staged_cell

VOCABULARY = 32
MakeCell = Callable[[], CellBackend]


def _tiny_model() -> torch.nn.Module:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=24,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


@pytest.fixture(params=["emulated", "one stage", "two stages", "three stages"])
def make_cell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeCell]:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def make_plane(name: str) -> WeightPlane:
            plane = SharedMemoryPlane(tmp_path, slot=f"{name}-{next(numbers)}")
            stack.callback(plane.close)
            return plane

        def make() -> CellBackend:
            if request.param == "emulated":
                return EmulatedCell(
                    weights=make_plane("w"),
                    gradients=make_plane("g"),
                    settings=EmulatedSettings(num_weights=16),
                )
            return stack.enter_context(
                staged_cell(
                    _tiny_model(),
                    num_stages=["one stage", "two stages", "three stages"].index(request.param) + 1,
                    settings=StageSettings(
                        loss=StreamedLoss(), optimizer=AdamWSettings(learning_rate=1e-2)
                    ),
                    make_plane=make_plane,
                )
            )

        yield make


def _ran(cell: CellBackend, micro_step: MicroStep) -> StepCounts:
    """Run to its end."""
    total = cell.run(micro_step)
    while (more := cell.finish_one()).micro_steps:
        total = add_counts(total, more)
    return total


def _micro_step(number: int, *, step: int = 0, version: int = 0, length: int = 9) -> MicroStep:
    """Two executions of one path each; all but a path's first token is trained."""
    numbers = np.random.default_rng(number)
    half = length // 2
    bounds = [(0, half), (half, length)]
    return MicroStep(
        step=step,
        number=number,
        version=version,
        token_ids=numbers.integers(0, VOCABULARY, length).tolist(),
        position_ids=[position for start, end in bounds for position in range(end - start)],
        logprobs=[
            -3.0 * (position > start) for start, end in bounds for position in range(start, end)
        ],
        segments=[Segment(start=start, end=end) for start, end in bounds],
        paths=[
            TrainedPath(
                execution=f"e{number}.{index}",
                group=f"g{number}",
                turn=f"t{number}.{index}",
                pieces=[(start, end)],
                trained=[(start + 1, end)],
                advantage=1.0 if index else -1.0,
                num_path_tokens=end - start - 1,
                num_execution_tokens=end - start - 1,
            )
            for index, (start, end) in enumerate(bounds)
        ],
    )


def _counted_only(number: int) -> MicroStep:
    path = TrainedPath(
        execution="e9",
        group="g9",
        turn="t9",
        pieces=[],
        trained=[],
        advantage=0.0,
        num_path_tokens=4,
        num_execution_tokens=4,
    )
    return MicroStep(
        step=0,
        number=number,
        version=0,
        token_ids=[],
        position_ids=[],
        logprobs=[],
        segments=[],
        paths=[path],
    )


def _opened(make_cell: MakeCell) -> CellBackend:
    cell = make_cell()
    cell.enter_training()
    assert cell.open_step(0, 0, None) == 0
    return cell


def _equal(first: CellBackend, second: CellBackend) -> bool:
    ours, theirs = first.parameters(), second.parameters()
    return ours.keys() == theirs.keys() and all(
        array.tobytes() == theirs[name].tobytes() for name, array in ours.items()
    )


def _trained_alone(make_cell: MakeCell, numbers: list[int]) -> CellBackend:
    cell = _opened(make_cell)
    for number in numbers:
        cell.run(_micro_step(number))
    cell.reduce([])
    assert cell.update(1).is_applied
    return cell


def test_a_step_changes_the_weights_and_reports_what_it_counted(make_cell: MakeCell) -> None:
    cell = _opened(make_cell)
    before = cell.parameters()
    added = _ran(cell, _micro_step(0))
    assert (added.num_executions, added.num_tokens, added.micro_steps) == (2.0, 7, [0])
    cell.run(_micro_step(1))
    counts = cell.reduce([])
    assert (counts.num_executions, counts.num_tokens, counts.micro_steps) == (4.0, 14, [0, 1])
    norms = cell.update(1)
    assert norms.is_applied
    assert norms.grad_norm > 0
    after = cell.parameters()
    assert any((before[name] != after[name]).any() for name in before)


def test_weights_are_fixed_until_the_update(make_cell: MakeCell) -> None:
    cell, fresh = _opened(make_cell), make_cell()
    for number in range(3):
        cell.run(_micro_step(number))
    cell.expose_gradients(0)
    cell.reduce([])
    assert _equal(cell, fresh)


def test_a_satellite_that_joins_has_the_cores_weights_and_version(make_cell: MakeCell) -> None:
    core = _trained_alone(make_cell, [0])
    satellite = make_cell()
    assert not _equal(core, satellite)
    satellite.enter_training()
    assert satellite.open_step(1, 1, core.expose_weights(1)) == 1
    assert _equal(core, satellite)
    assert _ran(satellite, _micro_step(0, step=1, version=1)).num_tokens == 7


def test_a_reduce_can_be_repeated_with_other_members(make_cell: MakeCell) -> None:
    core, first, second = (_opened(make_cell) for _ in range(3))
    core.run(_micro_step(0))
    first.run(_micro_step(1))
    second.run(_micro_step(2))
    parts = [first.expose_gradients(0), second.expose_gradients(0)]
    assert core.reduce(parts).micro_steps == [0, 1, 2]
    assert core.reduce(parts[:1]).micro_steps == [0, 1]
    core.update(1)
    parted = _opened(make_cell)
    parted.run(_micro_step(0))
    other = _opened(make_cell)
    other.run(_micro_step(1))
    parted.reduce([other.expose_gradients(0)])
    parted.update(1)
    assert _equal(core, parted)


def test_a_reduce_that_cannot_pull_a_member_leaves_the_own_sums(
    make_cell: MakeCell, tmp_path: Path
) -> None:
    core, lost = _opened(make_cell), _opened(make_cell)
    core.run(_micro_step(0))
    lost.run(_micro_step(1))
    part = lost.expose_gradients(0)
    Path(part[0].parts[0].address).unlink()
    with pytest.raises(BoundaryError, match="gone"):
        core.reduce([part])
    core.reduce([])
    core.update(1)
    assert _equal(core, _trained_alone(make_cell, [0]))


def test_a_micro_step_in_two_sums_is_our_fault(make_cell: MakeCell) -> None:
    core, other = _opened(make_cell), _opened(make_cell)
    core.run(_micro_step(0))
    other.run(_micro_step(0))
    with pytest.raises(InvariantError, match="micro-step 0 of step 0 is in two sums"):
        core.reduce([other.expose_gradients(0)])
    with pytest.raises(InvariantError, match="ran twice"):
        core.run(_micro_step(0))


@pytest.mark.parametrize("wrong", [{"step": 1}, {"version": 1}])
def test_work_of_another_step_or_version_is_refused(
    make_cell: MakeCell, wrong: dict[str, int]
) -> None:
    cell = _opened(make_cell)
    with pytest.raises(BoundaryError, match="open is step 0, version 0"):
        cell.run(_micro_step(0, **wrong))
    with pytest.raises(BoundaryError, match="step 1 asked"):
        cell.expose_gradients(1)


def test_dropped_sums_leave_nothing_behind(make_cell: MakeCell) -> None:
    cell = _opened(make_cell)
    cell.run(_micro_step(7))
    cell.drop_sums()
    cell.open_step(0, 0, None)
    cell.run(_micro_step(0))
    cell.reduce([])
    cell.update(1)
    assert _equal(cell, _trained_alone(make_cell, [0]))


def test_a_step_without_trainable_tokens_makes_no_update(make_cell: MakeCell) -> None:
    cell = _opened(make_cell)
    assert cell.run(_counted_only(0)).num_executions == 1.0
    cell.reduce([])
    norms = cell.update(1)
    assert not norms.is_applied
    assert "no trainable token" in norms.reason
    assert _equal(cell, make_cell())


def test_what_is_saved_is_restored_and_trains_on_bit_for_bit(
    make_cell: MakeCell, tmp_path: Path
) -> None:
    cell = _trained_alone(make_cell, [0, 1])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    cell.save(str(folder))
    again = make_cell()
    again.restore(str(folder))
    assert _equal(cell, again)
    for one in (cell, again):
        one.enter_training()
        one.open_step(1, 1, None)
        one.run(_micro_step(2, step=1, version=1))
        one.reduce([])
        one.update(2)
    assert _equal(cell, again)


def test_a_cell_leaves_and_enters_training_again(make_cell: MakeCell) -> None:
    cell = _opened(make_cell)
    cell.run(_micro_step(5))
    cell.leave_training()
    cell.enter_training()
    cell.open_step(0, 0, None)
    cell.run(_micro_step(0))
    cell.reduce([])
    cell.update(1)
    assert _equal(cell, _trained_alone(make_cell, [0]))


def test_a_failed_load_leaves_the_weights(make_cell: MakeCell) -> None:
    core, cell = _trained_alone(make_cell, [0]), make_cell()
    snapshot = core.expose_weights(1)
    with Path(snapshot.parts[0].address).open("r+b") as file:
        file.seek(-70, 2)
        file.write(b"\xff" * 70)
    with pytest.raises(BoundaryError, match="torn"):
        cell.load(snapshot)
    assert _equal(cell, make_cell())


def test_what_has_no_tokens_ends_at_once_and_counts_once(make_cell: MakeCell) -> None:
    cell = _opened(make_cell)
    total = cell.run(_micro_step(1))
    overtaking = cell.run(_counted_only(0))
    assert overtaking.micro_steps[-1] == 0
    total = add_counts(total, overtaking)
    total = add_counts(total, _ran(cell, _micro_step(2)))
    assert sorted(total.micro_steps) == [0, 1, 2]
    assert cell.settle(0)[0].num_executions == 5.0


def test_times_of_a_step_are_its_own(make_cell: MakeCell) -> None:
    cell = _opened(make_cell)
    _ran(cell, _micro_step(0))
    cell.settle(0)
    began_s = time.monotonic()
    cell.open_step(1, 0, None)
    _ran(cell, _micro_step(1, step=1))
    _, stages = cell.settle(1)
    within_s = time.monotonic() - began_s
    for one in stages:
        parts = (one.forward_s, one.backward_s, one.bubble_s, one.waiting_s)
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= within_s + 0.01


def test_a_checkpoint_that_does_not_fit_leaves_all_as_it_was(
    make_cell: MakeCell, tmp_path: Path
) -> None:
    """The last file is short of one weight: stages that read theirs write nothing."""
    saved, cell = _trained_alone(make_cell, [0, 1]), _trained_alone(make_cell, [2])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    saved.save(str(folder))
    last = sorted(folder.glob("model*.safetensors"))[-1]
    tensors = load_file(last)
    save_file({name: tensors[name][:-1] for name in tensors}, last)
    before = cell.parameters()
    with pytest.raises((BoundaryError, ValueError)):
        cell.restore(str(folder))
    after = cell.parameters()
    assert all((before[name] == after[name]).all() for name in before)


def test_a_cell_tells_what_it_holds(make_cell: MakeCell) -> None:
    cell = _trained_alone(make_cell, [0, 1])
    before = cell.held()
    assert min(before.weights_bytes, before.gradients_bytes, before.resident_bytes) > 0
    assert before.kv_pool_bytes == before.kv_used_bytes == 0
    cell.expose_weights(1)
    assert cell.held().exposed_bytes > before.exposed_bytes
    if not isinstance(cell, EmulatedCell):
        assert before.optimizer_bytes == 2 * before.gradients_bytes
        cell.leave_training()
        after = cell.held()
        assert after.gradients_bytes == after.activations_bytes == 0
        assert after.optimizer_bytes == before.optimizer_bytes
