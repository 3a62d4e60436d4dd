"""Attention over KV slots for one flat row of mixed prefill chunks and decodes.

Owns: what of the row attends to what of the pool. Must not know: requests, sampling, modules.
Invariants: a token sees positions 0..its own of its own slot; every query row of a padded group
sees at least position 0, so no row is NaN by masking.
Grouped-query heads are query rows, so keys and values are never repeated.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from opengyre.engines.torch_engine.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Segments attended together, padded to t query tokens: n segments.

    `queries` [n, t] flat indices into the row (padding repeats some index; None: the n tokens of
    the row, t = 1), `rows` those of [n * t] that are real with `targets` their flat indices (None:
    the group is all of the row), `mask` additive [n, 1, G * t, num_keys] (None: all is seen),
    `slots` a slice of the pool or the n slot indices.
    """

    queries: Tensor | None
    rows: Tensor | None
    targets: Tensor | None
    mask: Tensor | None
    slots: slice | Tensor
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """`writes` [T] are flat (slot, position) rows of the pool for the row's keys and values."""

    pool: KVPool
    writes: Tensor
    groups: list[Group]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, H, D], key and value [T, Hkv, D] to [T, H * D]; writes KV first."""
        cache = self.pool.layer(layer)
        keys, values = cache.flatten(1, 2)
        keys.index_copy_(0, self.writes, key)
        values.index_copy_(0, self.writes, value)
        if len(self.groups) == 1 and self.groups[0].targets is None:
            return _attended(query, cache, self.groups[0]).flatten(1)
        made = query.new_empty(query.shape)
        for group in self.groups:
            part = _attended(query, cache, group)
            if group.rows is not None:
                part = part[group.rows]
            assert group.targets is not None, "a group among others names its targets"
            made.index_copy_(0, group.targets, part)
        return made.flatten(1)


def _attended(row: Tensor, cache: Tensor, group: Group) -> Tensor:
    """[n * t, H, D] of row [T, H, D] and cache [2, slots, positions, Hkv, D]."""
    num_heads, dim = row.shape[1:]
    num_kv_heads = cache.shape[-2]
    share = num_heads // num_kv_heads
    if isinstance(group.slots, slice):
        key, value = cache[:, group.slots, : group.num_keys].transpose(2, 3)
    else:
        key, value = cache[:, :, : group.num_keys].index_select(1, group.slots).transpose(2, 3)
    num = key.shape[0]
    if group.queries is None:
        query = row.view(num, num_kv_heads, share, dim)
        made = scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
        return made.reshape(num, num_heads, dim)
    query = row[group.queries].view(num, -1, num_kv_heads, share, dim)
    query = query.permute(0, 2, 3, 1, 4).reshape(num, num_kv_heads, -1, dim)
    made = scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
    made = made.view(num, num_kv_heads, share, -1, dim).permute(0, 3, 1, 2, 4)
    return made.reshape(-1, num_heads, dim)
