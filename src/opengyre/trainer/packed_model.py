"""A causal language model over packed rows: logprobs of trained tokens, each in its own line.

Owns: the attention function that keeps lines apart. Must not know losses or steps. Invariants: a
token sees its segment so far and the segment's ancestors, nothing else, so a tree's token is
computed once for all lines that hold it; the head runs only where a trained token is predicted.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from opengyre.seams.cells import Segment
from opengyre.seams.errors import BoundaryError

ATTENTION = "gyre_packed"
UNDERSTOOD = {"lines", "scaling", "dropout", "is_causal"}
"""Options that the packed attention honours; `IGNORED` say nothing about what a token sees."""
IGNORED = {
    "cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
MASKED_TOKENS = 512
"""Queries of a branch that share one call: what a mask holds, and what it wastes, is bounded."""


class Lines:
    """What every layer's attention needs to know of one micro-step's `segments`, made once.

    States [1, heads, T, dim] are split at every bound of a segment or an ancestor: the backward of
    one split costs T, that of a slice for each segment would cost T each.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        bounds = {bound for one in self.segments for bound in (one.start, one.end)}
        bounds |= {bound for one in self.segments for range_ in one.ancestors for bound in range_}
        self._bounds = sorted(bounds)
        self._sizes = [b - a for a, b in pairwise(self._bounds)]
        self._corner = _corner(self.segments, device)

    def split(self, states: Tensor) -> list[Tensor]:
        return list(torch.split(states, self._sizes, dim=2))

    def own(self, parts: Sequence[Tensor], one: Segment) -> Tensor:
        """The states of a segment's own tokens."""
        return _joined(self._between(parts, one.start, one.end))

    def along(self, parts: Sequence[Tensor], one: Segment) -> Tensor:
        """The states of the line that ends with a segment."""
        before = [part for a, b in one.ancestors for part in self._between(parts, a, b)]
        return _joined([*before, *self._between(parts, one.start, one.end)])

    def mask(self, num_queries: int, num_keys: int) -> Tensor:
        """True where a query may look: the last query sees all keys, the one before all but one."""
        return self._corner[-num_queries:, -num_keys:]

    def _between(self, parts: Sequence[Tensor], start: int, end: int) -> Sequence[Tensor]:
        return parts[bisect_left(self._bounds, start) : bisect_left(self._bounds, end)]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention along each token's line. query [1, heads, T, dim], key and value
    [1, kv heads, T, dim]; returns [1, T, heads, dim]. The option `lines` covers all T tokens in
    order. Raises BoundaryError for a layer that asks for more: a window, a bias, a soft cap."""
    _refuse_more(attention_mask, options)
    lines: Lines = options["lines"]
    queries, keys, values = (lines.split(states) for states in (query, key, value))
    outputs: list[Tensor] = []
    for one in lines.segments:
        own = lines.own(queries, one)
        attended = (own, lines.along(keys, one), lines.along(values, one))
        if _is_mostly_own(one):
            outputs.append(_causal(*attended, options.get("scaling")))
        else:
            outputs += _masked(*attended, lines, options.get("scaling"))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _refuse_more(attention_mask: Tensor | None, options: Mapping[str, Any]) -> None:
    more = [n for n, value in options.items() if value is not None and value is not False]
    more = sorted(set(more) - UNDERSTOOD - IGNORED)
    if options.get("is_causal") is False:
        more.append("is_causal=False")
    if attention_mask is not None:
        more.append("attention_mask")
    if options.get("dropout"):
        more.append("dropout")
    if more:
        raise _unpackable(more[0])


def _unpackable(what: str) -> BoundaryError:
    return BoundaryError("trainer", f"attention with {what} cannot be packed", retryable=False)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Queries are the last of the line. Empty ones stand in for the ancestors', so that the kernel
    needs no mask; they cost half of the ancestors' square."""
    num_before = key.shape[2] - query.shape[2]
    if num_before:
        query = functional.pad(query, (0, 0, num_before, 0))
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=_is_grouped(query, key)
    )
    return output[:, :, num_before:]


def _masked(
    query: Tensor, key: Tensor, value: Tensor, lines: Lines, scale: float | None
) -> list[Tensor]:
    """The same in blocks of queries, each of which looks at no key behind it. Key heads are
    repeated because CUDA's kernels with a mask know no groups (not run on a GPU)."""
    num_before = key.shape[2] - query.shape[2]
    if _is_grouped(query, key):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    outputs: list[Tensor] = []
    for start in range(0, query.shape[2], MASKED_TOKENS):
        block = query[:, :, start : start + MASKED_TOKENS]
        end = num_before + start + block.shape[2]
        outputs.append(
            functional.scaled_dot_product_attention(
                block,
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=lines.mask(block.shape[2], end),
                scale=scale,
            )
        )
    return outputs


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


def _num_before(segment: Segment) -> int:
    return sum(b - a for a, b in segment.ancestors)


def _is_mostly_own(segment: Segment) -> bool:
    """Ancestors up to half of its own tokens cost less as empty queries than in a mask."""
    return 2 * _num_before(segment) <= segment.end - segment.start


def _corner(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """The mask of the largest block; that of any other is its lower right corner."""
    masked = [one for one in segments if not _is_mostly_own(one)]
    num_queries = min(MASKED_TOKENS, max((one.end - one.start for one in masked), default=0))
    num_keys = max((_num_before(one) + one.end - one.start for one in masked), default=0)
    whole = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return whole.tril(num_keys - num_queries)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def predecessors(segments: Sequence[Segment], targets: Tensor) -> Tensor:
    """Flat position of the token before each of `targets` in its line, shape [M]."""
    before = torch.arange(-1, max(one.end for one in segments) - 1, device=targets.device)
    for one in segments:
        if one.ancestors:
            before[one.start] = one.ancestors[-1][1] - 1
    return before[targets]


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Segments take the place of a mask, but not of a window."""
    if local_size is not None:
        raise _unpackable("sliding_window")


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
        lines=Lines(segments, token_ids.device),
    ).logits[0]
    return chosen_logprobs(logits, token_ids[targets], temperature)


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Logprob of the tokens `chosen` [M] under `logits` [M, vocabulary] divided by `temperature`,
    as the sampler's were; half precision is raised to float32."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, chosen[:, None])[:, 0]
