"""Sampling: keyed by seed and position, filtered by top-k, top-p and min-p, honest logprobs."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from opengyre.engines.torch_engine.sampling import SamplingRows, sample, uniforms


def rows(num_rows: int, **settings: Any) -> SamplingRows:
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 1, "positions": 0}
    full = usual | settings
    return SamplingRows(
        temperature=np.broadcast_to(np.asarray(full["temperature"], np.float64), num_rows).copy(),
        top_k=np.broadcast_to(np.asarray(full["top_k"], np.int64), num_rows).copy(),
        top_p=np.broadcast_to(np.asarray(full["top_p"], np.float64), num_rows).copy(),
        min_p=np.broadcast_to(np.asarray(full["min_p"], np.float64), num_rows).copy(),
        seeds=np.broadcast_to(np.asarray(full["seeds"], np.uint64), num_rows).copy(),
        positions=np.broadcast_to(np.asarray(full["positions"], np.uint64), num_rows).copy(),
    )


def logits_of(probs: list[float], num_rows: int) -> torch.Tensor:
    return torch.tensor(probs).log().repeat(num_rows, 1)


def test_uniforms_are_spread_and_differ_by_seed_and_by_position() -> None:
    places = np.arange(20_000, dtype=np.uint64)
    by_position = uniforms(np.full(20_000, 7, np.uint64), places)
    by_seed = uniforms(places, np.full(20_000, 7, np.uint64))
    for drawn in (by_position, by_seed):
        assert 0 <= drawn.min() < 1e-3
        assert 1 - 1e-3 < drawn.max() < 1
        counts, _ = np.histogram(drawn, 20, (0, 1))
        assert abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03


def test_frequencies_follow_the_probabilities_at_a_temperature() -> None:
    num_rows = 20_000
    probs = np.array([0.5, 0.3, 0.2, 0.0])
    asked = rows(num_rows, temperature=0.5, positions=np.arange(num_rows))
    ids, logprobs = sample(logits_of(probs.tolist(), num_rows), asked)
    sharpened = probs**2 / (probs**2).sum()
    assert np.bincount(ids, minlength=4) / num_rows == pytest.approx(sharpened, abs=0.015)
    assert logprobs == pytest.approx(np.log(sharpened[ids]), abs=1e-5)


def test_a_row_draws_the_same_whatever_is_beside_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50) * 3
    mixed: dict[str, Any] = {
        "temperature": [1.0, 0.0, 0.7, 1.3, 1.0, 0.5],
        "top_k": [0, 0, 5, 0, 3, 0],
        "top_p": [1.0, 1.0, 1.0, 0.6, 0.9, 1.0],
        "min_p": [0.0, 0.9, 0.1, 0.0, 0.3, 0.2],
        "seeds": [1, 2, 3, 4, 5, 2**64 - 1],
        "positions": [10, 11, 12, 13, 14, 15],
    }
    ids, logprobs = sample(logits.clone(), rows(6, **mixed))
    for row in range(6):
        alone = rows(1, **{name: values[row] for name, values in mixed.items()})
        one, logprob = sample(logits[row : row + 1].clone(), alone)
        assert one[0] == ids[row]
        assert logprob[0] == pytest.approx(logprobs[row], abs=1e-5)


def test_top_k_and_top_p_keep_the_likeliest_and_renormalise() -> None:
    probs = [0.1, 0.4, 0.2, 0.3]
    positions = np.arange(500)
    by_k, logprobs = sample(logits_of(probs, 500), rows(500, top_k=2, positions=positions))
    assert set(by_k.tolist()) == {1, 3}
    assert logprobs == pytest.approx(np.log(np.where(by_k == 1, 4 / 7, 3 / 7)), abs=1e-5)
    by_p, _ = sample(logits_of(probs, 500), rows(500, top_p=0.71, positions=positions))
    assert set(by_p.tolist()) == {1, 2, 3}
    alone, _ = sample(logits_of(probs, 500), rows(500, top_p=0.01, positions=positions))
    assert set(alone.tolist()) == {1}


def test_min_p_keeps_what_has_its_share_of_the_likeliest_and_renormalises() -> None:
    probs, positions = [0.1, 0.4, 0.2, 0.3], np.arange(500)
    ids, logprobs = sample(logits_of(probs, 500), rows(500, min_p=0.6, positions=positions))
    assert set(ids.tolist()) == {1, 3}
    assert logprobs == pytest.approx(np.log(np.where(ids == 1, 4 / 7, 3 / 7)), abs=1e-5)
    alone, logprobs = sample(logits_of(probs, 500), rows(500, min_p=1.0, positions=positions))
    assert set(alone.tolist()) == {1}
    assert logprobs == pytest.approx(np.zeros(500), abs=1e-6)


@pytest.mark.parametrize(
    "chosen",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.6, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.6, "top_k": 40, "top_p": 0.95, "min_p": 0.1},
        {"top_p": 0.6, "min_p": 0.3},
    ],
    ids=str,
)
def test_what_is_kept_and_its_logprobs_are_those_of_transformers(chosen: dict[str, Any]) -> None:
    """Each row of the same logits draws at another position; together they show what is kept."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5)) * 2
    expected = warped(logits, chosen)[0].log_softmax(-1).numpy()
    asked = rows(2000, positions=np.arange(2000), **chosen)
    ids, logprobs = sample(logits.repeat(2000, 1), asked)
    assert np.isfinite(expected[ids]).all()
    assert logprobs == pytest.approx(expected[ids], abs=1e-5)
    is_likely = expected > np.log(0.01)
    assert set(np.flatnonzero(is_likely).tolist()) <= set(ids.tolist())


def warped(logits: torch.Tensor, chosen: dict[str, Any]) -> torch.Tensor:
    """As `generate` does it: its own list of warpers, in its order."""
    settings = GenerationConfig(
        do_sample=True,
        top_k=chosen.get("top_k", 0),
        **{name: value for name, value in chosen.items() if name != "top_k"},
    )
    tiny = LlamaConfig(
        vocab_size=60,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    warpers = LlamaForCausalLM(tiny)._get_logits_processor(settings)
    scores: torch.Tensor = warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone())
    return scores


def test_greedy_rows_take_the_likeliest_with_the_logprob_at_temperature_one() -> None:
    ids, logprobs = sample(logits_of([0.2, 0.7, 0.1], 3), rows(3, temperature=0.0, top_k=1))
    assert ids.tolist() == [1, 1, 1]
    assert logprobs == pytest.approx(np.log([0.7] * 3), abs=1e-6)


def test_logits_that_are_not_finite_show_in_the_logprob_of_their_row_alone() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = torch.nan
    _, logprobs = sample(logits, rows(3, temperature=[1.0, 1.0, 0.0]))
    assert np.isfinite(logprobs).tolist() == [True, False, True]


def test_a_large_vocabulary_is_drawn_in_blocks_by_the_same_probabilities() -> None:
    """All the mass lies in few words, at the edges of blocks among others."""
    num_words, num_rows = 5000, 6000
    probs = np.zeros(num_words)
    words = [0, 1023, 1024, 3000, 4999]
    probs[words] = [0.1, 0.2, 0.3, 0.15, 0.25]
    logits = torch.from_numpy(probs).float().log().expand(num_rows // 10, -1)
    counts = np.zeros(num_words, np.int64)
    for part in range(10):
        positions = np.arange(part * num_rows // 10, (part + 1) * num_rows // 10)
        ids, logprobs = sample(logits.clone(), rows(num_rows // 10, positions=positions))
        assert logprobs == pytest.approx(np.log(probs[ids]), abs=1e-5)
        counts += np.bincount(ids, minlength=num_words)
    assert counts / num_rows == pytest.approx(probs, abs=0.025)
    assert set(np.flatnonzero(counts).tolist()) == set(words)
