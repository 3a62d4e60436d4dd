"""What a role will hold: the count against what torch holds, on tiny models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.cells import Segment
from opengyre.seams.errors import ConfigError
from opengyre.seams.memory import MemoryHeld, all_held
from opengyre.trainer.cut import cut_of
from opengyre.trainer.memory import (
    MemoryPlan,
    in_engine,
    in_rollout,
    in_training,
    saved_bytes,
    work_bytes,
)
from opengyre.trainer.model_sizes import ModelSizes, read_sizes
from opengyre.trainer.packed_model import ATTENTION, register_attention, trained_logprobs

NUM_TOKENS = 96
FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def _model(family: str, **more: Any) -> Any:
    torch.set_num_threads(1)
    kind, module = FAMILIES[family]
    shape = {
        "vocab_size": 56,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
    }
    return module(kind(**{**shape, **more})).eval()


def _sizes(model: Any, folder: Path, num_stages: int = 1) -> ModelSizes:
    model.save_pretrained(folder)
    return read_sizes(folder, num_stages=num_stages)


def _kept_bytes(model: Any, segments: list[Segment], num_trained: int) -> int:
    """Storages that autograd keeps of one forward, beside the weights."""
    register_attention()
    model.config._attn_implementation = ATTENTION
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        logprobs = trained_logprobs(
            model,
            token_ids=torch.arange(NUM_TOKENS) % 50,
            position_ids=torch.arange(NUM_TOKENS),
            segments=segments,
            targets=torch.arange(NUM_TOKENS - num_trained, NUM_TOKENS),
            temperature=1.0,
        )
    assert logprobs.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_of_activations_is_what_autograd_keeps(
    family: str, num_kv_heads: int, tmp_path: Path
) -> None:
    model = _model(family, num_key_value_heads=num_kv_heads)
    sizes = _sizes(model, tmp_path)
    kept = _kept_bytes(model, [Segment(start=0, end=NUM_TOKENS)], num_trained=70)
    counted = saved_bytes(sizes, 4, num_tokens=NUM_TOKENS, num_trained=70)
    assert abs(kept - counted) <= 0.005 * kept
    assert saved_bytes(sizes, 4, num_tokens=NUM_TOKENS) > counted


def test_several_lines_keep_what_one_line_of_their_length_keeps(tmp_path: Path) -> None:
    model = _model("qwen3")
    sizes = _sizes(model, tmp_path)
    lines = [Segment(start=0, end=40), Segment(start=40, end=NUM_TOKENS)]
    counted = saved_bytes(sizes, 4, num_tokens=NUM_TOKENS, num_trained=30)
    assert abs(_kept_bytes(model, lines, num_trained=30) - counted) <= 0.1 * counted


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_folder_says_how_many_weights_each_stage_trains(
    num_stages: int, is_tied: bool, tmp_path: Path
) -> None:
    model = _model("llama", tie_word_embeddings=is_tied)
    sizes = _sizes(model, tmp_path, num_stages)
    assert sizes.num_weights == sum(one.numel() for one in model.parameters())
    cuts = [
        cut_of(model, stage=stage, num_stages=num_stages, temperature=1.0)
        for stage in range(num_stages)
    ]
    trained = [sum(one.numel() for one in cut.parameters.values()) for cut in cuts]
    assert sizes.num_stage_weights == tuple(trained)
    assert sizes.num_layers == 3
    assert sizes.num_tied == (56 * 24 if is_tied and num_stages > 1 else 0)


def test_a_folder_without_weights_or_with_an_odd_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say its sizes"):
        read_sizes(tmp_path)
    _model("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
    with pytest.raises(ConfigError, match="num_attention_heads"):
        read_sizes(tmp_path)


SIZES = ModelSizes(
    num_weights=1000,
    num_stage_weights=(600, 500),
    num_stage_layers=(2, 1),
    hidden=8,
    intermediate=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocabulary=50,
)
TIED = replace(SIZES, num_tied=100)


def _plan(*, is_core: bool, keeps_reference: bool = False) -> MemoryPlan:
    return MemoryPlan(
        number_bytes=4,
        num_kv_tokens=10,
        num_micro_step_tokens=20,
        is_core=is_core,
        keeps_reference=keeps_reference,
    )


def test_a_satellite_as_engine_holds_its_weights_and_kv_and_nothing_else() -> None:
    held = in_rollout(SIZES, _plan(is_core=False))
    assert held == in_engine(SIZES, _plan(is_core=False))
    assert held.weights_bytes == 4000
    assert held.kv_pool_bytes == 10 * 2 * 3 * 1 * 4 * 4
    assert held.resident_bytes == held.weights_bytes + held.kv_pool_bytes


def test_the_core_keeps_moments_copies_and_all_stages_in_both_roles() -> None:
    plan = _plan(is_core=True)
    rollout, training = in_rollout(SIZES, plan), in_training(SIZES, plan)
    assert rollout.weights_bytes == training.weights_bytes == 4 * (1000 + 500)
    assert rollout.optimizer_bytes == training.optimizer_bytes == 2 * 4 * 1100
    assert rollout.exposed_bytes == training.exposed_bytes == 2 * 4 * 1100
    assert (rollout.gradients_bytes, training.gradients_bytes) == (0, 4 * 1100)
    assert training.kv_pool_bytes == 0


def test_both_ends_of_the_core_expose_the_gradient_of_what_is_tied() -> None:
    plain, tied = (in_training(one, _plan(is_core=True)) for one in (SIZES, TIED))
    assert tied.exposed_bytes - plain.exposed_bytes == 2 * 2 * 4 * 100
    assert in_training(TIED, _plan(is_core=False)).exposed_bytes == 0


def test_a_frozen_reference_is_a_second_set_of_weights() -> None:
    plain, kept = (
        in_training(SIZES, _plan(is_core=False, keeps_reference=k)) for k in (False, True)
    )
    assert kept.weights_bytes - plain.weights_bytes == 4 * 1100


def test_an_earlier_stage_has_more_micro_steps_in_flight() -> None:
    plan = _plan(is_core=False)
    first = work_bytes(SIZES, plan, stage=0)
    one = saved_bytes(SIZES, 4, num_tokens=20, stage=0)
    more = saved_bytes(replace(SIZES, num_stage_layers=(3, 1)), 4, num_tokens=20, stage=0)
    assert first == 2 * one + 2 * (more - one), "a layer on its way back"


@pytest.mark.parametrize(
    ("sizes", "num_passing"),
    [
        (replace(SIZES, vocabulary=400), 3 * 20 * 400),
        (replace(SIZES, num_stage_weights=(1, 9000)), 9000),
    ],
    ids=["logits", "weights"],
)
def test_a_large_vocabulary_and_large_weights_pass_through_too(
    sizes: ModelSizes, num_passing: int
) -> None:
    last = saved_bytes(sizes, 4, num_tokens=20, stage=1)
    assert work_bytes(sizes, _plan(is_core=False), stage=1) == last + 4 * num_passing


def test_processes_of_a_cell_are_added_up() -> None:
    one, other = MemoryHeld(weights_bytes=3, resident_bytes=5), MemoryHeld(weights_bytes=4)
    assert all_held([one, other]) == MemoryHeld(weights_bytes=7, resident_bytes=5)
