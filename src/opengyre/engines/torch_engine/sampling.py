"""Sampling of a batch of rows: temperature, top-k, top-p, min-p, by (seed, absolute position).

Must not know: requests, KV. Invariant: a row's draw depends on its logits, settings, seed and
position alone, never on the rows beside it, so a continued request samples what an unbroken one
does. The order is that of transformers' warpers: top-p is of what top-k kept, renormalised; vLLM
cuts by min-p first, which differs only where both bite. Of equal tokens top-k keeps the lower ids.
Reference for the counter-based generator: splitmix64, Steele et al., OOPSLA 2014.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_BLOCK_WORDS = 1024
_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Settings of n rows, arrays of length n. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0
    keep everything; min_p drops what has less than this share of the likeliest token's probability.
    `positions` are the absolute positions of the tokens to be sampled."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray


def sample(logits: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    """Sampled ids [n] and their logprobs [n] under the distribution they were sampled from:
    softmax(logits / temperature), renormalised over what top-k, top-p and min-p keep; for greedy
    rows softmax(logits). `logits` is [n, vocabulary]; a logprob that is not finite means they were
    not.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    is_greedy = rows.temperature <= 0
    scale = np.where(is_greedy, 1.0, rows.temperature)
    if (scale != 1.0).any():
        logits = logits.div_(_column(scale, logits))
    logprobs = logits.log_softmax(-1)
    if is_greedy.all():
        ids = logprobs.argmax(-1)
    else:
        logprobs = _filtered(logprobs, rows, is_greedy)
        ids = _draw(logprobs, uniforms(rows.seeds, rows.positions))
        if is_greedy.any():
            ids = torch.where(_on(is_greedy, logits), logprobs.argmax(-1), ids)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return ids.cpu().numpy(), chosen.double().cpu().numpy()


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, position); both are uint64 arrays."""
    mixed = _mix(_mix(seeds.astype(np.uint64) + _GAMMA) + positions.astype(np.uint64) * _GAMMA)
    uniform: np.ndarray = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _draw(logprobs: Tensor, uniform: np.ndarray) -> Tensor:
    """Inverse of the cumulative distribution; a token of probability 0 is never drawn. Of a large
    vocabulary a block of words is drawn first: to sum it whole in float64 takes ten times as long.
    """
    probs = logprobs.exp()
    num_words = probs.shape[-1]
    if num_words <= _BLOCK_WORDS:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        return _column_of(cumulative, _column(uniform, cumulative) * cumulative[:, -1:])[:, 0]
    blocks = torch.nn.functional.pad(probs, (0, -num_words % _BLOCK_WORDS))
    blocks = blocks.view(len(blocks), -1, _BLOCK_WORDS)
    sums = blocks.sum(-1).double()
    cumulative = sums.cumsum(-1)
    target = _column(uniform, cumulative) * cumulative[:, -1:]
    block = _column_of(cumulative, target)
    mass = sums.gather(-1, block)
    share = (target - cumulative.gather(-1, block) + mass) / mass
    rows = torch.arange(len(blocks), device=blocks.device)
    inside = blocks[rows, block[:, 0]].cumsum(-1, dtype=torch.float64)
    word = _column_of(inside, share.clamp(0.0, _BELOW_ONE) * inside[:, -1:])
    return (block * _BLOCK_WORDS + word)[:, 0].clamp_(max=num_words - 1)


def _column_of(cumulative: Tensor, target: Tensor) -> Tensor:
    """[n, 1] columns in which the targets [n, 1] lie."""
    found = torch.searchsorted(cumulative, target, right=True)
    return found.clamp_(max=cumulative.shape[-1] - 1)


def _filtered(logprobs: Tensor, rows: SamplingRows, is_greedy: np.ndarray) -> Tensor:
    num_words = logprobs.shape[-1]
    wanted = np.where((rows.top_k <= 0) | is_greedy, num_words, rows.top_k)
    top_k = np.minimum(wanted, num_words)
    top_p = np.where(is_greedy, 1.0, rows.top_p)
    min_p = np.where(is_greedy, 0.0, rows.min_p)
    if (top_k < num_words).any() or (top_p < 1.0).any():
        logprobs = _likeliest(logprobs, top_k, top_p)
    if (min_p > 0.0).any():
        logprobs = _above_share(logprobs, min_p)
    return logprobs


def _likeliest(logprobs: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)[None]
    is_kept = rank < _column(top_k, logprobs)
    probs = ordered.masked_fill(~is_kept, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs
    is_kept &= (before < _column(top_p, logprobs)) | _on(top_p >= 1.0, logprobs)[:, None]
    is_kept |= rank == 0
    is_out = torch.empty_like(is_kept).scatter_(-1, order, ~is_kept)
    return logprobs.masked_fill(is_out, -torch.inf).log_softmax(-1)


def _above_share(logprobs: Tensor, min_p: np.ndarray) -> Tensor:
    share = np.where(min_p > 0.0, np.log(np.maximum(min_p, np.finfo(np.float64).tiny)), -np.inf)
    least = logprobs.amax(-1, keepdim=True) + _column(share, logprobs)
    return logprobs.masked_fill(logprobs < least, -torch.inf).log_softmax(-1)


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device, like.dtype)[:, None]


def _on(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
