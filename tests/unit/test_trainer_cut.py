"""Stages of a cut model, joined, against the whole model's own forward of each path."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config

from opengyre.control.errors import InvariantError
from opengyre.seams.errors import ConfigError
from opengyre.trainer.cut import Cut, cut_of, load_cut
from opengyre.trainer.layers import layers_of_stage, refuse_uncuttable
from opengyre.trainer.packed_model import ATTENTION
from opengyre.trainer.reference import Reference
from opengyre.trainer.stage_model import StageModel
from opengyre.trainer.whole_model import WholeModel
from opengyre.trajectory.bundles import Layout
from tests.cut_models import (
    CUTTABLE,
    TEMPERATURE,
    config_of,
    gradients_by_path,
    gradients_of_stages,
    largest_difference,
    micro_step_of_tree,
    model_of,
    targets_of,
)
from tests.float64_models import in_float64

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _cuts(model: Any, num_stages: int) -> list[Cut]:
    return [
        cut_of(model, stage=stage, num_stages=num_stages, temperature=TEMPERATURE)
        for stage in range(num_stages)
    ]


def _loaded(folder: Path, num_stages: int, dtype: torch.dtype = torch.float32) -> list[Cut]:
    return [
        load_cut(
            folder,
            stage=stage,
            num_stages=num_stages,
            dtype=dtype,
            device="cpu",
            temperature=TEMPERATURE,
        )
        for stage in range(num_stages)
    ]


def _load(folder: Path, stage: int) -> Cut:
    return load_cut(
        folder, stage=stage, num_stages=2, dtype=torch.float32, device="cpu", temperature=1.0
    )


def _enter(stages: list[Any]) -> Iterator[StageModel]:
    for stage in stages:
        stage.enter()
        yield stage


def _save(model: Any, folder: Path, *, is_sharded: bool = False) -> None:
    model.save_pretrained(folder, max_shard_size="4KB" if is_sharded else "1GB")


@given(st.integers(1, 64), st.data())
def test_every_stage_has_layers_and_the_last_has_about_one_less(
    num_layers: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    parts = [layers_of_stage(num_layers, stage=s, num_stages=num_stages) for s in range(num_stages)]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert all(len(part) > 0 for part in parts)
    loads = [len(part) for part in parts[:-1]] + [len(parts[-1]) + 1]
    least = max(-(-(num_layers + 1) // num_stages), 2 if num_stages > 1 else 0)
    assert max(loads) <= least


def test_more_stages_than_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_uncuttable(config_of("llama"), 8)
    assert str(caught.value) == (
        "the model has 4 layers; topology.stages_per_cell = 8 needs at least 8; "
        "use topology.stages_per_cell = 4 or less"
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(), "a model of type 'gpt2'"),
        (config_of("mistral", sliding_window=8), "mistral with sliding-window attention"),
        (
            config_of("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0),
            "qwen3 with sliding-window attention",
        ),
        (
            config_of(
                "llama", rope_parameters={"rope_type": "dynamic", "factor": 2, "rope_theta": 1e4}
            ),
            "llama with a rotary embedding of type 'dynamic'",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line_and_only_above_one_stage(
    config: Any, words: str
) -> None:
    refuse_uncuttable(config, 1)
    with pytest.raises(ConfigError) as caught:
        refuse_uncuttable(config, 2)
    assert str(caught.value) == (
        f"{words} cannot be cut into 2 pipeline stages; llama, mistral, qwen2, qwen3 with full "
        "attention can; use topology.stages_per_cell = 1"
    )


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", CUTTABLE)
def test_stages_joined_equal_the_whole_model_path_by_path(kind: str, is_tied: bool) -> None:
    model = in_float64(model_of(config_of(kind, tie_word_embeddings=is_tied)))
    for layout in Layout:
        step = micro_step_of_tree(layout)
        logprobs, gradients = gradients_by_path(model, step)
        whole: list[Any] = [WholeModel(model, temperature=TEMPERATURE)]
        for stages in (whole, *(_cuts(model, num_stages) for num_stages in (1, 2, 4))):
            ours, summed = gradients_of_stages(list(_enter(stages)), step)
            for stage in stages:
                stage.leave()
            assert torch.allclose(ours, logprobs, rtol=0, atol=1e-12)
            assert largest_difference(summed, gradients) < 1e-12


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_ends_share_a_tied_embedding_and_nothing_else_is_held_twice(num_stages: int) -> None:
    for is_tied in (True, False):
        model = model_of(config_of("qwen3", tie_word_embeddings=is_tied))
        parts = [cut.parameters for cut in _cuts(model, num_stages)]
        assert EMBEDDING in parts[0]
        assert (EMBEDDING in parts[-1]) is is_tied
        assert ("lm_head.weight" in parts[-1]) is not is_tied
        names = [name for part in parts for name in part]
        assert len(names) - len(set(names)) == is_tied
        assert set(names) == set(dict(model.named_parameters()))
        for part in parts:
            for name, parameter in part.items():
                assert parameter is model.get_parameter(name)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_parts_from_a_folder_equal_the_whole_model(
    kind: str, is_tied: bool, is_sharded: bool, tmp_path: Path
) -> None:
    model = model_of(config_of(kind, tie_word_embeddings=is_tied))
    _save(model, tmp_path, is_sharded=is_sharded)
    step = micro_step_of_tree(Layout.TREE)
    cuts = _loaded(tmp_path, 2, torch.float64)
    logprobs, gradients = gradients_of_stages(list(_enter(cuts)), step)
    whole = WholeModel(model.double(), temperature=TEMPERATURE)
    want, theirs = gradients_of_stages(list(_enter([whole])), step)
    assert torch.allclose(logprobs, want, rtol=0, atol=1e-12)
    assert largest_difference(gradients, theirs) < 1e-12


def test_a_folder_gives_a_part_its_own_memory_and_no_more(tmp_path: Path) -> None:
    model = model_of(config_of("qwen3", tie_word_embeddings=False))
    _save(model, tmp_path)
    for cut, shared in zip(_loaded(tmp_path, 2), _cuts(model, 2), strict=True):
        assert {n: p.shape for n, p in cut.parameters.items()} == {
            n: p.shape for n, p in shared.parameters.items()
        }
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in [*cut.module.parameters(), *cut.module.buffers()]
        }
        num_bytes = sum(p.nbytes for p in shared.parameters.values())
        num_angles = sum(one.nbytes for one in shared.module.buffers())
        assert sum(storages.values()) == num_bytes + num_angles
        assert all(one.device.type == "cpu" for one in cut.module.parameters())


def test_files_of_other_stages_are_not_read(tmp_path: Path) -> None:
    model = model_of(config_of("qwen3", tie_word_embeddings=False))
    _save(model, tmp_path, is_sharded=True)
    (last,) = _cuts(model, 2)[1:]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index[name] for name in last.parameters}
    others = set(index.values()) - needed
    assert others
    for file in others:
        (tmp_path / file).unlink()
    for name, parameter in _load(tmp_path, 1).parameters.items():
        assert torch.equal(parameter, model.get_parameter(name))
    with pytest.raises(ConfigError, match="cannot be loaded: model-"):
        _load(tmp_path, 0)


def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    _save(model_of(config_of("qwen3", num_hidden_layers=3)), tmp_path)
    config = config_of("qwen3", num_hidden_layers=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as missing:
        _load(tmp_path, 1)
    config.num_hidden_layers, config.intermediate_size = 3, 32
    config.layer_types = config.layer_types[:3]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as misshapen:
        _load(tmp_path, 1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as unreadable:
        _load(tmp_path, 1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError) as bare:
        _load(tmp_path, 1)
    for caught, words in (
        (missing, "weight model.layers.3.self_attn.q_proj.weight is in none of its files"),
        (misshapen, "has shape [24, 16], config.json says [32, 16]"),
        (unreadable, "no readable model.safetensors or model.safetensors.index.json"),
        (bare, f"model {tmp_path} cannot be loaded"),
    ):
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_released_weights_take_no_memory_and_come_back_to_be_filled(tmp_path: Path) -> None:
    model = model_of(config_of("qwen3", tie_word_embeddings=True))
    _save(model, tmp_path)
    step = micro_step_of_tree(Layout.PATH)
    cuts = _loaded(tmp_path, 2)
    before = gradients_of_stages(list(_enter(cuts)), step)
    last = cuts[1]
    kept = dict(last.parameters)
    last.leave()
    for _ in range(2):
        last.release()
    assert sum(p.untyped_storage().nbytes() for p in last.parameters.values()) == 0
    with pytest.raises(InvariantError, match="released weights"):
        last.enter()
    for _ in range(2):
        last.acquire()
    assert all(bool(p.isnan().all()) for p in last.parameters.values())
    last.enter()
    with torch.no_grad():
        for name, parameter in last.parameters.items():
            assert parameter is kept[name]
            parameter.copy_(model.get_parameter(name))
    after = gradients_of_stages(cuts, step)
    assert torch.equal(before[0], after[0])
    assert largest_difference(after[1], before[1]) == 0


def test_weights_that_the_engine_holds_too_are_not_released() -> None:
    model = model_of(config_of("llama"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (cut, _) = _cuts(model, 2)
    cut.release()
    cut.acquire()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_training_touches_its_own_part_only_and_leaves_it_as_it_was() -> None:
    model = model_of(config_of("qwen3", attention_dropout=0.5)).train().requires_grad_(False)
    model.model.layers[0].mlp.eval()
    flags = {name: one.training for name, one in model.named_modules()}
    cut = _cuts(model, 2)[0]
    attention = model.config._attn_implementation
    for _ in range(2):
        cut.enter()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == set(cut.parameters)
    assert model.config._attn_implementation == ATTENTION
    assert not model.model.layers[0].training
    step = micro_step_of_tree(Layout.PATH)
    states = cut.run(step, None, targets_of(step))
    assert torch.equal(states, cut.run(step, None, targets_of(step)))
    states.sum().backward()
    for _ in range(2):
        cut.leave()
    assert model.config._attn_implementation == attention
    assert {name: one.training for name, one in model.named_modules()} == flags
    assert not any(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_reference_of_each_stage_is_the_policy_the_run_began_with(num_stages: int) -> None:
    model = in_float64(model_of(config_of("qwen3", tie_word_embeddings=True)))
    step = micro_step_of_tree(Layout.TREE)
    targets = targets_of(step)
    want, _ = gradients_by_path(model, step)
    stages: list[Any] = (
        _cuts(model, num_stages) if num_stages > 1 else [WholeModel(model, temperature=TEMPERATURE)]
    )
    references = [Reference(stage) for stage in stages]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for stage, reference in zip(stages, references, strict=True):
        stage.enter()
        reference.place()
    line = None
    for reference in references:
        received = None if line is None else line.requires_grad_()
        line = reference.run(step, received, targets)
    assert line is not None
    assert not line.requires_grad
    assert torch.allclose(line, want, rtol=0, atol=1e-12)
    ours, _ = gradients_of_stages(stages, step)
    assert not torch.allclose(ours, want, rtol=0, atol=1e-3)
    assert sum(one.num_bytes for one in references) == sum(
        p.nbytes for stage in stages for p in stage.parameters.values()
    )
