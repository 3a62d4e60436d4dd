"""The embedded rollout engine: continuous batching on the HF module that the trainer shares.

Owns: the step (plan, forward, sample) and its part of the role switch (KV memory, caches,
versioned weights). Must not know: text, roles, other processes.
Invariants: a forward runs only in the compute thread, where training runs too; the slot table is
touched there during a step and on the event loop only between steps; `commit` empties every
cache, so no KV of another version is read.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from opengyre.engines.compute import ComputeThread
from opengyre.engines.desk import Desk, Live, Sampled
from opengyre.engines.torch_engine.attention import KVPool, rollout_attention
from opengyre.engines.torch_engine.batch import Batch, BatchPlanner
from opengyre.engines.torch_engine.model import decode_row, kv_shape, refuse_unsupported
from opengyre.engines.torch_engine.sampling import SamplingRows, sample
from opengyre.engines.torch_engine.slots import SlotTable
from opengyre.engines.torch_engine.weights import WeightUpdate
from opengyre.seams.engine import EngineCaps, EngineStats, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.transport.chunk_stream import ChunkReader


class TorchEngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`max_running` requests share a forward of at most `step_tokens` tokens; `num_kv_slots`
    (0: as many as max_running) keep KV, those of finished requests as prefix cache."""

    max_running: int = 32
    max_waiting: int = 4096
    num_kv_slots: int = 0
    context_tokens: int = 1024
    step_tokens: int = 512
    version: int = 0


class TorchEngine:
    """Engine over `model` (see `load_model`). Raises ConfigError for what cannot run.

    logprob_mode is `processed`: a token's logprob is that of the distribution it was drawn from,
    softmax(logits / temperature), renormalised over what top-k and top-p keep. At temperature 0,
    where there is no distribution, it is that of softmax(logits).

    A continued request samples what an unbroken one would, unless a draw falls within rounding of
    a boundary between two tokens: recomputed logits differ by about 1e-6 in float32 (far more in
    bfloat16).
    """

    def __init__(self, model: Any, config: TorchEngineConfig, compute: ComputeThread) -> None:
        refuse_unsupported(model.config)
        num_slots = config.num_kv_slots or config.max_running
        _refuse_config(config, num_slots, model.config.max_position_embeddings)
        self._model = model
        self._config = config
        self._compute = compute
        dtype, device = model.get_input_embeddings().weight.dtype, model.device
        shape = kv_shape(model.config, num_slots=num_slots, context_tokens=config.context_tokens)
        self._pool = KVPool(shape, dtype=dtype, device=device)
        self._table = SlotTable(num_slots, config.context_tokens)
        self._planner = BatchPlanner(
            self._table,
            self._pool,
            share=model.config.num_attention_heads // shape.num_kv_heads,
            step_tokens=config.step_tokens,
            dtype=dtype,
            device=device,
        )
        self._update: WeightUpdate | None = None
        self._checksum = 0
        self._num_prefill_tokens = 0
        self._desk = Desk(
            self,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            context_tokens=config.context_tokens,
            version=config.version,
        )

    @property
    def checksum(self) -> int:
        """Of the last committed update's tensors in the order they were pushed."""
        return self._checksum

    def submit(self, request: GenerateRequest) -> ChunkReader:
        return self._desk.submit(request)

    async def freeze(self, request_id: str) -> None:
        await self._desk.stop(request_id, Finish.FROZEN)

    async def freeze_all(self) -> None:
        await self._desk.stop_all(Finish.FROZEN)

    async def cancel(self, request_id: str) -> None:
        await self._desk.stop(request_id, Finish.CANCELLED)

    async def pause(self) -> None:
        await self._desk.pause()

    async def resume(self) -> None:
        if not self._pool.is_allocated:
            raise BoundaryError("engine", "cannot resume: KV is released", retryable=False)
        self._desk.resume()

    async def begin_update(self, version: int) -> None:
        """Requests that were not frozen wait and are recomputed under the new version."""
        self._desk.begin_update()
        self._update = WeightUpdate(self._model, version)

    async def push(self, name: str, tensor: Any) -> None:
        """A failed push ends the update: only a whole new one makes the engine routable."""
        if self._update is None:
            raise BoundaryError("engine", "push outside an update", retryable=False)
        try:
            await self._compute.run(self._update.push, name, tensor)
        except BoundaryError:
            self._update = None
            raise

    async def commit(self, version: int) -> None:
        update, self._update = self._update, None
        if update is None or update.version != version:
            raise BoundaryError("engine", f"no update to {version} is open", retryable=False)
        update.check_complete()
        self._table.clear()
        self._checksum = update.checksum
        self._desk.commit_update(version)

    async def release(self) -> None:
        if self._desk.num_running:
            raise BoundaryError("engine", "requests run; freeze them first", retryable=False)
        await self._desk.pause()
        self._table.clear()
        self._pool.free()

    async def restore(self) -> None:
        """KV memory is there again, empty; the engine stays paused until `resume`."""
        self._pool.allocate()

    def stats(self) -> EngineStats:
        """`kv_used_bytes` counts what is cached: of running requests and for reuse."""
        num_cached = int(self._table.num_cached.sum())
        return EngineStats(
            num_running=self._desk.num_running,
            num_waiting=self._desk.num_waiting,
            kv_used_bytes=num_cached * self._pool.bytes_per_token,
            version=self._desk.version,
            num_generated_tokens=self._desk.num_generated_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            failure=self._desk.failure,
            num_reused_tokens=self._table.num_reused_tokens,
        )

    def caps(self) -> EngineCaps:
        return EngineCaps(
            engine="torch",
            logprob_mode="processed",
            is_resume_exact=True,
            can_export_kv=False,
            weight_path="push",
            context_tokens=self._config.context_tokens,
        )

    async def step(self, lives: Sequence[Live]) -> list[Sampled]:
        return await self._compute.run(self._step, lives)

    def forget(self, live: Live) -> None:
        self._table.free(live)

    def _step(self, lives: Sequence[Live]) -> list[Sampled]:
        """In the compute thread: one forward over all decodes and some prefill chunks."""
        with torch.inference_mode(), rollout_attention(self._model.config):
            live_of_slot = {self._slot_of(live): live for live in lives}
            batch = self._planner.plan(list(live_of_slot))
            hidden = decode_row(self._model, batch.ids, batch.positions, batch.attention)
            self._table.num_cached[batch.slots] += batch.num_computed
            self._num_prefill_tokens += batch.num_prefill_tokens
            if len(batch.sampled_slots) == 0:
                return []
            logits = self._model.lm_head(hidden[batch.sampled_rows])
            ids, logprobs = sample(logits, self._sampling_rows(batch))
        return self._sampled(live_of_slot, batch.sampled_slots, ids, logprobs)

    def _slot_of(self, live: Live) -> int:
        slot = self._table.slot_of(live)
        if slot is not None:
            return slot
        given = self._table.assign(live)
        if given.source != given.slot and given.num_reused:
            self._pool.copy_prefix(
                source=given.source, slot=given.slot, num_tokens=given.num_reused
            )
        return given.slot

    def _sampling_rows(self, batch: Batch) -> SamplingRows:
        table, slots = self._table, batch.sampled_slots
        return SamplingRows(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            seeds=table.seeds[slots],
            positions=table.num_ids[slots].astype(np.uint64),
        )

    def _sampled(
        self,
        live_of_slot: dict[int, Live],
        slots: np.ndarray,
        ids: np.ndarray,
        logprobs: np.ndarray,
    ) -> list[Sampled]:
        made = []
        rows = zip(slots.tolist(), ids.tolist(), logprobs.tolist(), strict=True)
        is_finite = np.isfinite(logprobs)
        self._table.append(slots[is_finite], ids[is_finite])
        for (slot, token, logprob), is_sound in zip(rows, is_finite.tolist(), strict=True):
            live = live_of_slot[slot]
            if is_sound:
                made.append(Sampled(live, [token], [logprob]))
            else:
                self._pool.scrub(self._table.spoil(live))
                reason = "the logits are not finite"
                made.append(Sampled(live, [], [], finish=Finish.ERROR, reason=reason))
        return made


def _refuse_config(config: TorchEngineConfig, num_slots: int, max_positions: int) -> None:
    if num_slots < config.max_running:
        what = f"num_kv_slots {num_slots} is below max_running {config.max_running}"
        raise ConfigError(f"engine: {what}; each running request needs one")
    if config.step_tokens < config.max_running:
        what = f"step_tokens {config.step_tokens} is below max_running {config.max_running}"
        raise ConfigError(f"engine: {what}; each running request adds a token to a step")
    if config.context_tokens > max_positions:
        what = f"context_tokens {config.context_tokens} exceeds the model's {max_positions}"
        raise ConfigError(f"engine: {what} positions; lower it")
