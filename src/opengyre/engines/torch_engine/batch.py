"""The plan of one forward pass: which tokens of which slots, in one flat row.

Must not know: models, sampling, asyncio. Invariants: decodes come first, in slot order; a step
has at most `step_tokens` tokens, and every decode is in it; prompts share what the decodes leave,
so that a short one does not wait for a long one; a slot whose pending tokens are all in the row has
its last one sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opengyre.engines.torch_engine.attention import AttentionPlan, Group
from opengyre.engines.torch_engine.kv_pool import KVPool
from opengyre.engines.torch_engine.slots import SlotTable

SHORT_CHUNK_TOKENS = 32
MIN_SHARES = 8
MAX_SPAN_RATIO = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`num_tokens` of `slot` from position `start`, at `offset` in the flat row."""

    slot: int
    start: int
    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`ids` and `positions` are [T]; `sampled_rows` index T, `sampled_slots` match them.
    `slots` and `num_computed` say what is cached after the pass."""

    ids: Tensor
    positions: Tensor
    attention: AttentionPlan
    sampled_rows: Tensor
    sampled_slots: np.ndarray
    slots: np.ndarray
    num_computed: np.ndarray
    num_prefill_tokens: int


class BatchPlanner:
    """Plans rows over one table and pool. `share` = query heads for each KV head."""

    def __init__(
        self,
        table: SlotTable,
        pool: KVPool,
        *,
        share: int,
        step_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._table = table
        self._pool = pool
        self._share = share
        self._step_tokens = step_tokens
        self._dtype = dtype
        self._device = device

    def plan(self, slots: Sequence[int]) -> Batch:
        """`slots` have work to do, in order of arrival."""
        table = self._table
        order = np.asarray(slots, np.int64)
        pending = table.num_ids[order] - table.num_cached[order]
        decodes = np.sort(order[pending == 1])
        chunks = self._chunks(order[pending > 1], first_offset=len(decodes))
        rows_slot = [decodes, *(np.full(one.num_tokens, one.slot) for one in chunks)]
        rows_at = [table.num_cached[decodes], *(_span(one) for one in chunks)]
        slot_of_row, positions = np.concatenate(rows_slot), np.concatenate(rows_at)
        used = np.concatenate([decodes, np.array([c.slot for c in chunks], np.int64)])
        counts = np.array([1] * len(decodes) + [c.num_tokens for c in chunks], np.int64)
        last_rows = np.cumsum(counts) - 1
        is_sampled = table.num_cached[used] + counts == table.num_ids[used]
        context = self._pool.shape.context_tokens
        return Batch(
            ids=self._tensor(table.ids[slot_of_row, positions]),
            positions=self._tensor(positions),
            attention=AttentionPlan(
                pool=self._pool,
                writes=self._tensor(slot_of_row * context + positions),
                groups=self._groups(decodes, chunks),
            ),
            sampled_rows=self._tensor(last_rows[is_sampled]),
            sampled_slots=used[is_sampled],
            slots=used,
            num_computed=counts,
            num_prefill_tokens=int(counts[len(decodes) :].sum()),
        )

    def _chunks(self, slots: np.ndarray, *, first_offset: int) -> list[Segment]:
        chunks = []
        offset = first_offset
        starts = self._table.num_cached[slots]
        shares = prompt_shares(self._table.num_ids[slots] - starts, self._step_tokens - offset)
        for slot, start, num in zip(slots.tolist(), starts.tolist(), shares, strict=True):
            if num > 0:
                chunks.append(Segment(slot=slot, start=start, num_tokens=num, offset=offset))
                offset += num
        return chunks

    def _groups(self, decodes: np.ndarray, chunks: list[Segment]) -> list[Group]:
        short = [one for one in chunks if one.num_tokens <= SHORT_CHUNK_TOKENS]
        parts = [short] if short else []
        parts += [[one] for one in chunks if one.num_tokens > SHORT_CHUNK_TOKENS]
        is_alone = not parts
        groups = [self._decode_group(decodes, is_alone=is_alone)] if len(decodes) else []
        return groups + [self._chunk_group(part) for part in parts]

    def _decode_group(self, decodes: np.ndarray, *, is_alone: bool) -> Group:
        """Over a slice of the pool where the slots lie densely: nothing is copied then, and the
        slots in between cost a masked row each."""
        first, last = int(decodes[0]), int(decodes[-1]) + 1
        is_dense = last - first <= MAX_SPAN_RATIO * len(decodes)
        if not is_dense or last - first == len(decodes):
            chosen = slice(first, last) if is_dense else self._tensor(decodes)
            queries = None if is_alone else np.arange(len(decodes))[:, None]
            targets = None if queries is None else self._tensor(queries[:, 0])
            ends = self._table.num_cached[decodes][:, None]
            return self._group(chosen, queries, ends, rows=None, targets=targets)
        at = decodes - first
        queries = np.zeros((last - first, 1), np.int64)
        queries[at, 0] = np.arange(len(decodes))
        ends = np.zeros((last - first, 1), np.int64)
        ends[at, 0] = self._table.num_cached[decodes]
        targets = self._tensor(np.arange(len(decodes)))
        return self._group(slice(first, last), queries, ends, rows=at, targets=targets)

    def _chunk_group(self, part: list[Segment]) -> Group:
        width = max(one.num_tokens for one in part)
        queries = np.zeros((len(part), width), np.int64)
        ends = np.zeros((len(part), width), np.int64)
        for row, one in enumerate(part):
            queries[row, : one.num_tokens] = np.arange(one.offset, one.offset + one.num_tokens)
            ends[row, : one.num_tokens] = _span(one)
        rows = np.concatenate([r * width + np.arange(c.num_tokens) for r, c in enumerate(part)])
        targets = self._tensor(queries.reshape(-1)[rows])
        slots = np.array([one.slot for one in part], np.int64)
        chosen = slice(part[0].slot, part[0].slot + 1) if len(part) == 1 else self._tensor(slots)
        return self._group(chosen, queries, ends, rows=rows, targets=targets)

    def _group(
        self,
        slots: slice | Tensor,
        queries: np.ndarray | None,
        ends: np.ndarray,
        *,
        rows: np.ndarray | None,
        targets: Tensor | None,
    ) -> Group:
        """`ends` [n, t]: the last position each query sees."""
        num_keys = int(ends.max()) + 1
        return Group(
            queries=None if queries is None else self._tensor(queries),
            mask=self._mask(ends, num_keys),
            rows=None if rows is None else self._tensor(rows),
            targets=targets,
            slots=slots,
            num_keys=num_keys,
        )

    def _mask(self, ends: np.ndarray, num_keys: int) -> Tensor | None:
        if int(ends.min()) + 1 == num_keys:
            return None
        is_hidden = np.arange(num_keys) > ends[:, :, None]
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(self._tensor(is_hidden), -torch.inf)
        return mask[:, None].expand(-1, self._share, -1, -1).flatten(1, 2)[:, None]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def prompt_shares(wanted: np.ndarray, budget: int) -> list[int]:
    """Of a budget of tokens, for prompts by arrival: each its least chunk, an eighth of all,
    while there is one; then each as much more as the others, if it wants that much."""
    shares = np.zeros(len(wanted), np.int64)
    least = max(1, budget // MIN_SHARES)
    for k, want in enumerate(wanted.tolist()):
        shares[k] = min(want, least, budget)
        budget -= int(shares[k])
    order = np.argsort(wanted, kind="stable").tolist()
    for k, num_left in zip(order, range(len(order), 0, -1), strict=True):
        more = min(int(wanted[k] - shares[k]), budget // num_left)
        shares[k] += more
        budget -= more
    made: list[int] = shares.tolist()
    return made


def _span(one: Segment) -> np.ndarray:
    return np.arange(one.start, one.start + one.num_tokens)
