"""A causal language model over packed rows: logprobs of trained tokens, segment by segment.

Owns: the attention function that keeps segments apart. Must not know losses or steps.
Invariants: a token sees only earlier tokens of its own segment; positions start at 0 in each
segment; the head runs only where a trained token is predicted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from opengyre.seams.errors import BoundaryError

ATTENTION = "gyre_packed"


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention inside each segment. query [1, heads, T, dim], key and value
    [1, kv heads, T, dim]; returns [1, T, heads, dim]. The option `segment_bounds`, (start, end)
    pairs, covers all T tokens. Raises BoundaryError for a layer with a sliding window."""
    if options.get("sliding_window") is not None:
        raise BoundaryError("trainer", "sliding-window attention cannot be packed", retryable=False)
    outputs = [
        functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for start, end in options["segment_bounds"]
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Segments take the place of a mask."""


def register_attention() -> None:
    """Make ATTENTION known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def trained_logprobs(
    model: nn.Module,
    *,
    token_ids: Tensor,
    position_ids: Tensor,
    segment_bounds: Sequence[tuple[int, int]],
    targets: Tensor,
    temperature: float,
) -> Tensor:
    """Logprob of each token at flat position `targets` [M] given its segment so far, shape [M].

    `token_ids` and `position_ids` [T]; no target may be the first token of a segment. Logits are
    divided by `temperature`, as the sampler's were; half precision is raised to float32.
    """
    logits: Tensor = model(
        input_ids=token_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        logits_to_keep=targets - 1,
        segment_bounds=segment_bounds,
    ).logits[0]
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    chosen = token_ids[targets][:, None]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, chosen)[:, 0]
