"""Packed rows and trees against single sequences through the model's own attention.

The norms compute in float32 even here, so 1e-6 is equality.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.cells import Segment
from opengyre.seams.errors import BoundaryError
from opengyre.trainer import packed_model
from opengyre.trainer.packed_model import (
    ATTENTION,
    Lines,
    packed_attention,
    register_attention,
    trained_logprobs,
)

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}
LENGTHS = [5, 1, 9, 2]


@pytest.fixture(params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if request.param == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES)).double().eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()


def _sequences() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(2)
    return [torch.randint(0, 20, (length,), generator=numbers) for length in LENGTHS]


def _alone(model: torch.nn.Module, sequence: Tensor, temperature: float) -> Tensor:
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
    return (logits / temperature).log_softmax(-1).gather(1, sequence[1:, None])[:, 0]


def _packed(model: torch.nn.Module, sequences: list[Tensor], temperature: float) -> Tensor:
    register_attention()
    model.config._attn_implementation = ATTENTION
    segments, start = [], 0
    for sequence in sequences:
        segments.append(Segment(start=start, end=start + len(sequence)))
        start += len(sequence)
    position_ids = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return trained_logprobs(
        model,
        token_ids=torch.cat(sequences),
        position_ids=position_ids,
        segments=segments,
        targets=position_ids.nonzero()[:, 0],
        temperature=temperature,
    )


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def _branched(
    model: torch.nn.Module, trunk: Tensor, branches: list[tuple[int, Tensor]]
) -> list[Tensor]:
    """Logprobs of each branch's own tokens; a branch keeps that many tokens of the trunk."""
    register_attention()
    model.config._attn_implementation = ATTENTION
    segments, parts = [Segment(start=0, end=len(trunk))], [trunk]
    for num_kept, own in branches:
        start = segments[-1].end
        segments.append(Segment(start=start, end=start + len(own), ancestors=[(0, num_kept)]))
        parts.append(own)
    depths = [num_kept + torch.arange(len(own)) for num_kept, own in [(0, trunk), *branches]]
    logprobs = trained_logprobs(
        model,
        token_ids=torch.cat(parts),
        position_ids=torch.cat(depths),
        segments=segments,
        targets=torch.arange(len(trunk), segments[-1].end),
        temperature=1.0,
    )
    return list(logprobs.split([len(own) for _, own in branches]))


@pytest.mark.parametrize("masked_tokens", [2, 512])
def test_branches_long_and_short_equal_their_lines_alone(
    model: torch.nn.Module, masked_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_model, "MASKED_TOKENS", masked_tokens)
    ids = torch.randint(0, 20, (40,), generator=torch.Generator().manual_seed(4))
    trunk, branches = ids[:10], [(10, ids[10:15]), (1, ids[15:27]), (7, ids[27:28]), (4, ids[28:])]
    alone = [_alone(model, torch.cat([trunk[:k], own]), 1.0)[k - 1 :] for k, own in branches]
    torch.cat(alone).square().sum().backward()
    want = _gradients(model)
    branched = _branched(model, trunk, branches)
    torch.cat(branched).square().sum().backward()
    for ours, theirs in zip(branched, alone, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    for ours, theirs in zip(_gradients(model), want, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_packed_logprobs_and_gradients_equal_single_sequences(
    model: torch.nn.Module, temperature: float
) -> None:
    sequences = _sequences()
    alone = torch.cat([_alone(model, one, temperature) for one in sequences])
    alone.square().sum().backward()
    want = _gradients(model)
    packed = _packed(model, sequences, temperature)
    packed.square().sum().backward()
    got = _gradients(model)
    assert torch.allclose(packed, alone, rtol=0, atol=1e-6)
    assert len(got) == len(want) > 0
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_segment_does_not_see_its_neighbours(model: torch.nn.Module) -> None:
    sequences = _sequences()
    before = _packed(model, sequences, 1.0)
    sequences[0] = (sequences[0] + 1) % 20
    after = _packed(model, sequences, 1.0)
    num_first = LENGTHS[0] - 1
    assert not torch.equal(before[:num_first], after[:num_first])
    assert torch.allclose(before[num_first:], after[num_first:], rtol=0, atol=1e-6)


def test_a_sliding_window_is_refused_not_ignored() -> None:
    torch.manual_seed(1)
    config = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(BoundaryError, match="sliding_window"):
        _packed(Qwen3ForCausalLM(config).double().eval(), _sequences(), 1.0)


@pytest.mark.parametrize(
    "more",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"attention_mask": torch.zeros(1, 1, 3, 3)},
        {"is_causal": False},
        {"dropout": 0.1},
    ],
)
def test_what_attention_asks_for_beyond_a_causal_line_is_refused_not_ignored(
    more: dict[str, Any],
) -> None:
    states = torch.ones(1, 4, 3, 4)
    plain = {
        "attention_mask": None,
        "lines": Lines([Segment(start=0, end=3)], states.device),
        "scaling": 0.5,
        "dropout": 0.0,
        "softcap": None,
    }
    output, _ = packed_attention(torch.nn.Module(), states, states, states, **plain)
    assert output.shape == (1, 3, 4, 4)
    with pytest.raises(BoundaryError, match=f"attention with {next(iter(more))}.* cannot be"):
        packed_attention(torch.nn.Module(), states, states, states, **{**plain, **more})
