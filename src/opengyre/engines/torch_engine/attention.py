"""Attention over KV slots for one flat row of mixed prefill chunks and decodes.

Owns: the KV pool's tensor, the attention function and its registration under a private name.
Must not know: requests, sampling. Invariants: a token sees positions 0..its own of its own slot;
every query row of a padded group sees at least position 0, so no row is NaN by masking; the
module's attention implementation is switched for a rollout forward only and put back.
Grouped-query heads are query rows, so keys and values are never repeated.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from opengyre.control.errors import InvariantError

IMPLEMENTATION = "opengyre_slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    num_layers: int
    num_slots: int
    context_tokens: int
    num_kv_heads: int
    head_dim: int

    def as_tuple(self) -> tuple[int, ...]:
        per_slot = (self.context_tokens, self.num_kv_heads, self.head_dim)
        return (self.num_layers, 2, self.num_slots, *per_slot)


class KVPool:
    """Keys and values [layer, 2, slot, position, kv head, dim]; no tensor while released."""

    def __init__(self, shape: KVShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._dtype = dtype
        self._device = device
        self._tensor: Tensor | None = None
        self._owner: weakref.ref[Any] | None = None
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self._tensor is not None

    @property
    def bytes_per_token(self) -> int:
        shape = self.shape
        per_layer = 2 * shape.num_kv_heads * shape.head_dim
        return shape.num_layers * per_layer * self._dtype.itemsize

    def allocate(self) -> None:
        """Zeros; on a CPU pages are touched only as slots fill."""
        if self._tensor is not None:
            return
        shape = self.shape.as_tuple()
        if self._device.type != "cpu":
            self._tensor = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._owner = weakref.ref(self._tensor)
            return
        num_bytes = int(np.prod(shape)) * self._dtype.itemsize
        memory = np.zeros(num_bytes, np.uint8)
        self._owner = weakref.ref(memory)
        self._tensor = torch.from_numpy(memory).view(self._dtype).view(shape)

    def free(self) -> None:
        """Memory is back with the system on return; raises InvariantError if a view is left."""
        self._tensor = None
        if self._owner is not None and self._owner() is not None:
            raise InvariantError("KV memory is still referenced after release")
        self._owner = None

    def layer(self, index: int) -> Tensor:
        if self._tensor is None:
            raise InvariantError("KV used while released")
        return self._tensor[index]

    def copy_prefix(self, *, source: int, slot: int, num_tokens: int) -> None:
        if self._tensor is not None:
            self._tensor[:, :, slot, :num_tokens] = self._tensor[:, :, source, :num_tokens]

    def scrub(self, slot: int) -> None:
        if self._tensor is not None:
            self._tensor[:, :, slot] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Segments attended together, padded to t query tokens: n segments.

    `queries` [n, t] flat indices into the row (padding repeats some index), `rows` those of
    [n * t] that are real with `targets` their flat indices, `mask` additive
    [n, 1, G * t, num_keys], `slots` a slice of the pool or the n slot indices.
    """

    queries: Tensor
    rows: Tensor | None
    targets: Tensor | None
    mask: Tensor
    slots: slice | Tensor
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """`writes` [T] are flat (slot, position) rows of the pool for the row's keys and values."""

    pool: KVPool
    writes: Tensor
    groups: list[Group]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] to [1, T, H, D]; writes KV first.

    The signature is that of transformers' attention functions; `options` holds its `scaling` and
    the AttentionPlan that `decode_row` passes as `plan`.
    """
    del attention_mask
    plan: AttentionPlan = options["plan"]
    scaling: float = options["scaling"]
    num_heads, num_tokens, dim = query.shape[1:]
    cache = plan.pool.layer(module.layer_idx)
    num_kv_heads = cache.shape[-2]
    flat = cache.view(2, -1, num_kv_heads, dim)
    flat[0].index_copy_(0, plan.writes, key[0].transpose(0, 1))
    flat[1].index_copy_(0, plan.writes, value[0].transpose(0, 1))
    by_token = query[0].transpose(0, 1)
    if len(plan.groups) == 1 and plan.groups[0].targets is None:
        return _attend_group(by_token, cache, plan.groups[0], scaling)[None], None
    out = query.new_empty(num_tokens, num_heads, dim)
    for group in plan.groups:
        made = _attend_group(by_token, cache, group, scaling)
        if group.rows is not None:
            made = made[group.rows]
        assert group.targets is not None, "a group among others names its targets"
        out.index_copy_(0, group.targets, made)
    return out[None], None


def _attend_group(by_token: Tensor, cache: Tensor, group: Group, scaling: float) -> Tensor:
    """[n * t, H, D]."""
    num_kv_heads, dim = cache.shape[-2:]
    num, num_tokens = group.queries.shape
    share = by_token.shape[1] // num_kv_heads
    query = by_token[group.queries].view(num, num_tokens, num_kv_heads, share, dim)
    query = query.permute(0, 2, 3, 1, 4).reshape(num, num_kv_heads, share * num_tokens, dim)
    if isinstance(group.slots, slice):
        key, value = cache[:, group.slots, : group.num_keys].transpose(2, 3)
    else:
        key, value = cache[:, :, : group.num_keys].index_select(1, group.slots).transpose(2, 3)
    made = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=group.mask, scale=scaling
    )
    made = made.view(num, num_kv_heads, share, num_tokens, dim).permute(0, 3, 1, 2, 4)
    return made.reshape(num * num_tokens, num_kv_heads * share, dim)


@contextmanager
def rollout_attention(config: Any) -> Iterator[None]:
    """The module of `config` attends through `attend` inside this block."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before
