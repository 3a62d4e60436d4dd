"""The role switch of the embedded cell: the engine's side is put back as it was."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.trainer.embedded import EmbeddedCell, whole_cell
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.packed_model import ATTENTION
from opengyre.trainer.reference import Reference
from opengyre.trainer.stage import Stage, StageSettings
from opengyre.trainer.whole_model import WholeModel
from opengyre.transport.weights_shm import SharedMemoryPlane


def _model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def _cell(module: nn.Module, folder: Path, *, kl_coefficient: float = 0.0) -> EmbeddedCell:
    settings = StageSettings(
        loss=StreamedLoss(kl_coefficient=kl_coefficient),
        optimizer=AdamWSettings(learning_rate=1e-3),
    )
    planes = [SharedMemoryPlane(folder, slot=slot) for slot in "wg"]
    return whole_cell(module, weights=planes[0], gradients=planes[1], settings=settings)


def _num_big_tensors(num_weights: int) -> int:
    gc.collect()
    return sum(
        issubclass(type(one), torch.Tensor) and one.numel() == num_weights
        for one in gc.get_objects()
    )


def test_leaving_puts_back_attention_flags_and_frees_the_gradients(tmp_path: Path) -> None:
    module = _model().eval().requires_grad_(False)
    attention = module.config._attn_implementation
    num_weights = sum(parameter.numel() for parameter in module.parameters())
    cell = _cell(module, tmp_path)
    cell.enter_training()
    cell.enter_training()
    assert module.config._attn_implementation == ATTENTION
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert _num_big_tensors(num_weights) > 0
    cell.leave_training()
    cell.leave_training()
    assert module.config._attn_implementation == attention
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert _num_big_tensors(num_weights) == 0
    with pytest.raises(BoundaryError, match="not in training"):
        cell.open_step(0, 0, None)


@pytest.mark.parametrize(("kl_coefficient", "num_copies"), [(0.0, 0), (0.1, 1)])
def test_initial_weights_are_copied_once_and_only_for_a_divergence(
    tmp_path: Path, kl_coefficient: float, num_copies: int
) -> None:
    """On the CPU the copy serves both roles as it is."""
    module = _model()
    num_embedding = module.model.embed_tokens.weight.numel()
    before = _num_big_tensors(num_embedding)
    cell = _cell(module, tmp_path, kl_coefficient=kl_coefficient)
    assert _num_big_tensors(num_embedding) == before + num_copies
    cell.enter_training()
    cell.leave_training()
    assert _num_big_tensors(num_embedding) == before + num_copies


def test_a_reference_is_as_large_as_the_weights_tied_ones_once() -> None:
    module = _model()
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    assert Reference(WholeModel(module, temperature=1.0)).num_bytes == num_bytes


def test_the_weights_keep_their_place_in_memory(tmp_path: Path) -> None:
    module = _model()
    places = [parameter.data_ptr() for parameter in module.parameters()]
    cell = _cell(module, tmp_path)
    cell.enter_training()
    cell.save(str(tmp_path))
    cell.restore(str(tmp_path))
    cell.leave_training()
    assert [parameter.data_ptr() for parameter in module.parameters()] == places


def test_tied_weights_travel_once(tmp_path: Path) -> None:
    names = set(_cell(_model(), tmp_path).parameters())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_half_precision_weights_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight is torch\.bfloat16"):
        _cell(_model().bfloat16(), tmp_path)


@pytest.mark.parametrize(
    ("text", "named"), [('{"schema": 2, "num_updates": 0}', "schema 2"), (None, "trainer.json")]
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_written(
    tmp_path: Path, text: str | None, named: str
) -> None:
    cell = _cell(_model(), tmp_path)
    cell.save(str(tmp_path))
    if text is None:
        (tmp_path / "trainer.json").unlink()
    else:
        (tmp_path / "trainer.json").write_text(text)
    other = _cell(_model(), tmp_path)
    before = other.parameters()
    with pytest.raises(BoundaryError, match=named):
        other.restore(str(tmp_path))
    assert all((array == before[name]).all() for name, array in other.parameters().items())


def test_a_greedy_temperature_is_refused(tmp_path: Path) -> None:
    settings = StageSettings(
        loss=StreamedLoss(), optimizer=AdamWSettings(learning_rate=1e-3), temperature=0.0
    )
    plane = SharedMemoryPlane(tmp_path, slot="w")
    with pytest.raises(ConfigError, match=r"temperature 0\.0"):
        whole_cell(_model(), weights=plane, gradients=plane, settings=settings)


def test_sums_of_others_are_added_one_at_a_time_and_a_lost_one_changes_nothing() -> None:
    settings = StageSettings(loss=StreamedLoss(), optimizer=AdamWSettings(learning_rate=1e-3))
    stage = Stage(WholeModel(_model(), temperature=1.0), settings=settings, is_last=True)
    stage.enter()
    num_weights = len(stage.sums.flat)
    before: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def pulled(last: int) -> Iterator[np.ndarray[Any, Any]]:
        for number in (1, 2, 4):
            assert all(one() is None for one in before), "the one before is still held"
            if number == last:
                raise BoundaryError("reduce", "the member is gone", retryable=True)
            part = np.full(num_weights, number, dtype=np.float32)
            before.append(weakref.ref(part))
            yield part
            del part

    stage.add_to_copy(pulled(last=0))
    assert set(stage.reduced.tolist()) == {7.0}
    with pytest.raises(BoundaryError, match="gone"):
        stage.add_to_copy(pulled(last=4))
    assert set(stage.reduced.tolist()) == {7.0}
    assert set(stage.sums.flat.tolist()) == {0.0}
