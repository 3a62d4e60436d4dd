"""A causal language model over packed rows: logprobs of trained tokens, each in its own line.

Owns: the attention function that keeps lines apart. Must not know losses or steps. Invariants: a
token sees its segment so far and the segment's ancestors, nothing else, so a tree's token is
computed once for all lines that hold it; the head runs only where a trained token is predicted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from opengyre.seams.cells import Segment
from opengyre.seams.errors import BoundaryError

ATTENTION = "gyre_packed"


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention along each token's line. query [1, heads, T, dim], key and value
    [1, kv heads, T, dim]; returns [1, T, heads, dim]. The option `segments` covers all T tokens in
    order. Raises BoundaryError for a layer with a sliding window."""
    if options.get("sliding_window") is not None:
        raise BoundaryError("trainer", "sliding-window attention cannot be packed", retryable=False)
    scale = options.get("scaling")
    is_grouped = query.shape[1] != key.shape[1]
    outputs = [
        functional.scaled_dot_product_attention(
            query[:, :, one.start : one.end],
            _along(key, one),
            _along(value, one),
            attn_mask=_mask(one, query.device),
            is_causal=not one.ancestors,
            scale=scale,
            enable_gqa=is_grouped,
        )
        for one in options["segments"]
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _along(states: Tensor, segment: Segment) -> Tensor:
    """Keys or values of the line that ends with `segment`."""
    ranges = [*segment.ancestors, (segment.start, segment.end)]
    return torch.cat([states[:, :, a:b] for a, b in ranges], dim=2)


def _mask(segment: Segment, device: torch.device) -> Tensor | None:
    """A token of a branch sees all ancestors, and its branch so far; None: causal says it all."""
    if not segment.ancestors:
        return None
    num_own = segment.end - segment.start
    num_all = num_own + sum(b - a for a, b in segment.ancestors)
    whole = torch.ones(num_own, num_all, dtype=torch.bool, device=device)
    return whole.tril(num_all - num_own)


def predecessors(segments: Sequence[Segment], targets: Tensor) -> Tensor:
    """Flat position of the token before each of `targets` in its line, shape [M]."""
    before = targets - 1
    for one in segments:
        if one.ancestors:
            before[targets == one.start] = one.ancestors[-1][1] - 1
    return before


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
    segments: Sequence[Segment],
    targets: Tensor,
    temperature: float,
) -> Tensor:
    """Logprob of each token at flat position `targets` [M] given its line so far, shape [M].

    `token_ids` and `position_ids` [T]; no target may be the first token of a line. Logits are
    divided by `temperature`, as the sampler's were; half precision is raised to float32.
    """
    logits: Tensor = model(
        input_ids=token_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        logits_to_keep=predecessors(segments, targets),
        segments=segments,
    ).logits[0]
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    chosen = token_ids[targets][:, None]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, chosen)[:, 0]
