"""Any causal language model as one stage, against its own forward of each path."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    MambaConfig,
    OPTConfig,
    PhiConfig,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from opengyre.seams.cells import MicroStep, TrainedPath
from opengyre.seams.errors import ConfigError
from opengyre.trainer.packable import why_not_packed
from opengyre.trainer.whole_model import WholeModel
from opengyre.trajectory.bundles import Layout
from tests.cut_models import (
    SIZES,
    TEMPERATURE,
    config_of,
    gradients_by_path,
    gradients_of_stages,
    largest_difference,
    logprobs_by_path,
    micro_step_of_tree,
    model_of,
    targets_of,
)

PACKED: dict[str, Any] = {
    "gpt2": GPT2Config(**SIZES, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "gpt-neox": GPTNeoXConfig(**SIZES, attention_dropout=0.5, hidden_dropout=0.5),
    "opt": OPTConfig(
        **SIZES, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=64, dropout=0.5
    ),
    "phi": PhiConfig(**SIZES, resid_pdrop=0.5, embd_pdrop=0.5),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
}
ALONE: dict[str, Any] = {
    "gemma2": Gemma2Config(**SIZES, head_dim=4, sliding_window=3, attention_dropout=0.5),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=4, sliding_window=3),
    "mamba": MambaConfig(**SIZES, state_size=4),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _in_training(model: Any) -> WholeModel:
    whole = WholeModel(model, temperature=TEMPERATURE)
    whole.enter()
    return whole


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("kind", [*PACKED, *ALONE])
def test_logprobs_and_gradients_are_those_of_the_model_alone_on_each_path(
    kind: str, layout: Layout
) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if kind == "qwen3-moe" else (torch.float64, 1e-12)
    model = model_of({**PACKED, **ALONE}[kind]).to(dtype)
    step = micro_step_of_tree(layout)
    logprobs, gradients = gradients_by_path(model, step)
    model.train()
    whole = _in_training(model)
    assert whole.is_packed is (kind in PACKED)
    ours, summed = gradients_of_stages([whole], step)
    assert torch.allclose(ours, logprobs, rtol=0, atol=tolerance)
    assert largest_difference(summed, gradients) < tolerance
    whole.leave()
    assert model.training


@pytest.mark.parametrize("kind", ["qwen3", "mamba"])
def test_targets_may_come_in_any_order_and_counted_paths_take_nothing(kind: str) -> None:
    model = model_of({**ALONE, "qwen3": config_of("qwen3")}[kind]).double()
    tree = micro_step_of_tree(Layout.TREE)
    counted = TrainedPath(
        execution="e3",
        group="g",
        turn="e3.t1",
        pieces=[],
        trained=[],
        advantage=1.0,
        num_path_tokens=3,
        num_execution_tokens=3,
    )
    step = MicroStep(
        step=0,
        number=0,
        version=0,
        token_ids=tree.token_ids,
        position_ids=tree.position_ids,
        logprobs=tree.logprobs,
        segments=tree.segments,
        paths=[counted, *tree.paths],
    )
    targets = targets_of(step)
    whole = _in_training(model)
    want = whole.run(tree, None, targets)
    assert torch.equal(whole.run(step, None, targets.flip(0)), want.flip(0))
    some = targets[1::3]
    assert torch.allclose(whole.run(step, None, some), want[1::3], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("qwen3"), ""),
        (config_of("qwen3", **WINDOW), "its attention has a window"),
        (config_of("mistral", sliding_window=8), "its attention has a window"),
        (config_of("llama", **DYNAMIC), "its rotary embedding is of type 'dynamic'"),
        (ALONE["mamba"], "its attention cannot be replaced"),
        (
            Gemma2Config(**SIZES, head_dim=4, layer_types=["full_attention"] * 4),
            "trainer: attention with sliding_window cannot be packed",
        ),
    ],
)
def test_what_stands_against_packing_is_named_and_said_once(
    config: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(config)
    assert why_not_packed(model) == reason
    with caplog.at_level(logging.INFO):
        assert WholeModel(model, temperature=1.0).is_packed is not bool(reason)
    told = [one.getMessage() for one in caplog.records if one.name.startswith("opengyre")]
    assert told == (
        [f"each line is trained by itself, which costs what they share: {reason}"] if reason else []
    )


def _mixes_the_past(scale: float) -> Any:
    """Still causal: each token's state takes some of all tokens before it in the row."""

    def hook(_: nn.Module, __: Any, states: Tensor) -> Tensor:
        return states + scale * (states.cumsum(dim=1) - states)

    return hook


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (0.1, "lines in one row differ from lines alone"),
        (1e-6, "a token sees other lines than its own"),
    ],
)
def test_a_model_that_mixes_the_row_outside_attention_is_not_packed(
    scale: float, reason: str
) -> None:
    model = model_of(config_of("llama"))
    before = model.model.embed_tokens.register_forward_hook(_mixes_the_past(scale))
    assert why_not_packed(model) == reason
    before.remove()
    assert why_not_packed(model) == ""


def test_a_model_that_cannot_be_trained_is_refused_in_one_line_and_left_alone() -> None:
    sizes = {**SIZES, "pad_token_id": 0}
    bert = model_of(BertConfig(**sizes))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    )
    whole_numbers = model_of(config_of("llama"))
    norm = whole_numbers.model.norm
    norm.weight = nn.Parameter(norm.weight.detach().char(), requires_grad=False)
    for model, kind, words in (
        (whole_numbers, "llama", "only Tensors of floating point"),
        (bert, "bert", "a token's logprob depends on what comes after it"),
        (t5, "t5", "it has an encoder"),
    ):
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        with pytest.raises(ConfigError) as caught:
            WholeModel(model, temperature=1.0)
        told = str(caught.value)
        assert told.startswith(f"a model of type '{kind}' cannot be trained (")
        assert words in told
        assert "\n" not in told
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


@pytest.mark.parametrize("kind", ["gpt2", "gemma3"])
def test_other_weights_take_the_place_of_the_models_own_for_one_run(kind: str) -> None:
    config = {**PACKED, **ALONE}[kind]
    step = micro_step_of_tree(Layout.TREE)
    model, other = model_of(config).double(), model_of(config, seed=2).double()
    whole = _in_training(model)
    targets = targets_of(step)
    own = whole.run(step, None, targets)
    with torch.no_grad():
        borrowed = whole.run_with(dict(other.named_parameters()), step, None, targets)
        want = logprobs_by_path(other, step)
    assert torch.allclose(borrowed, want, rtol=0, atol=1e-12)
    assert torch.equal(whole.run(step, None, targets), own)
