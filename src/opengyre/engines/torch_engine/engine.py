"""The embedded rollout engine: continuous batching on the HF module that the trainer shares.

Owns: the step (import, plan, forward, sample), pins, and its part of the role switch (KV memory,
caches, versioned weights). Must not know: text, roles, how bytes travel.
Invariants: a forward runs only in the compute thread, where training runs too; the slot table is
touched there during a step and on the event loop only between steps, but for the end of a pin;
`commit` empties every cache and `begin_update` ends every pin, so no KV of another version is read.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from opengyre.engines.checksum import digest_of
from opengyre.engines.compute import ComputeThread
from opengyre.engines.desk import Desk, Live, Sampled
from opengyre.engines.handoff import import_request, taken_by
from opengyre.engines.leases import Leases
from opengyre.engines.torch_engine.batch import Batch, BatchPlanner
from opengyre.engines.torch_engine.decoder import RowDecoder
from opengyre.engines.torch_engine.imports import MIN_PREFILL_TOKENS, STEP_BYTES, Imports
from opengyre.engines.torch_engine.kv_pool import KVPool, KVShape, Pin
from opengyre.engines.torch_engine.model import kv_shape, refuse_unsupported
from opengyre.engines.torch_engine.sampling import SamplingRows, sample
from opengyre.engines.torch_engine.slots import SlotTable
from opengyre.engines.torch_engine.weights import WeightUpdate
from opengyre.seams.engine import EngineCaps, EngineStats, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.kv import KVRef, KVRelease, KVTaken
from opengyre.transport.chunk_stream import ChunkReader

log = logging.getLogger(__name__)


class TorchEngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`max_running` requests share a forward of at most `step_tokens` tokens; `num_kv_slots`
    (0: as many as max_running) keep KV, those of finished requests as prefix cache.

    `kv_handoff` off, on or auto: prefixes of requests that leave frozen are pinned for
    `kv_lease_s`, those of idle executions by `kv_handoff_idle`; readers reach them by `kv_plane`,
    shm or tcp. `name` makes references unique over engines and lives ("": drawn).
    """

    max_running: int = 32
    max_waiting: int = 4096
    num_kv_slots: int = 0
    context_tokens: int = 1024
    step_tokens: int = 512
    version: int = 0
    name: str = ""
    kv_handoff: str = "off"
    kv_lease_s: float = 10.0
    kv_handoff_idle: bool = False
    kv_plane: str = "shm"


class TorchEngine:
    """Engine over `model` (see `load_model`). Raises ConfigError for what cannot run.

    logprob_mode is `processed`: a token's logprob is that of the distribution it was drawn from,
    softmax(logits / temperature), renormalised over what top-k, top-p and min-p keep. At
    temperature 0, where there is no distribution, it is that of softmax(logits).

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
        self._pool = KVPool(shape, dtype=dtype, device=device, plane=config.kv_plane)
        self._table = SlotTable(num_slots, config.context_tokens)
        self._kv_model = _kv_model(model.config, shape, dtype)
        self._leases = Leases(name=config.name, lease_s=config.kv_lease_s)
        self._imports = Imports(
            self._pool, self._table, mode=config.kv_handoff, model=self._kv_model
        )
        self._planner = BatchPlanner(
            self._table,
            self._pool,
            share=model.config.num_attention_heads // shape.num_kv_heads,
            step_tokens=config.step_tokens,
            dtype=dtype,
            device=device,
        )
        self._decode = RowDecoder(model, config.context_tokens)
        self._update: WeightUpdate | None = None
        self._checksum = 0
        self._num_prefill_tokens = 0
        self._desk = Desk(
            self,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            context_tokens=config.context_tokens,
            version=config.version,
            num_ids=model.get_input_embeddings().weight.shape[0],
        )

    @property
    def checksum(self) -> int:
        """Of the last committed update's tensors in the order they were pushed."""
        return self._checksum

    def submit(self, request: GenerateRequest) -> ChunkReader:
        return self._desk.submit(request)

    async def freeze(self, request_id: str, *, keeps_kv: bool = False) -> None:
        await self._desk.stop(request_id, Finish.FROZEN, keeps_kv=keeps_kv)

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        await self._desk.stop_all(Finish.FROZEN, keeps_kv=keeps_kv)

    async def cancel(self, request_id: str) -> None:
        await self._desk.stop(request_id, Finish.CANCELLED)

    async def import_kv(self, ref: KVRef) -> KVTaken:
        return await taken_by(self._desk.submit(import_request(ref)), ref)

    async def release_kv(self, ref: str) -> KVRelease:
        return self._leases.release(ref)

    async def export_kv(self) -> list[KVRef]:
        if self._config.kv_handoff == "off" or not self._config.kv_handoff_idle:
            return []
        desk, version = self._desk, self._desk.version
        if not (self._pool.is_allocated and desk.is_routable):
            return []
        idle = [one for one in self._table.executions() if desk.is_of_nobody(one)]
        found = await self._compute.run(self._table.pin_idle, idle)
        if not desk.is_routable or desk.version != version:
            for _, slot, _ in found:
                self._table.unpin(slot)
            return []
        pinned = [self._pin(who, slot, ids, is_idle=True) for who, slot, ids in found]
        return [ref for ref in pinned if ref is not None]

    async def pause(self) -> None:
        await self._desk.pause()

    async def resume(self) -> None:
        if not self._pool.is_allocated:
            raise BoundaryError("engine", "cannot resume: KV is released", retryable=False)
        self._desk.resume()

    async def begin_update(self, version: int) -> None:
        """Requests that were not frozen wait and are recomputed under the new version."""
        self._desk.begin_update()
        self._leases.drop_all()
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
        await self._leases.wait_none()
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
            kv_capacity_bytes=self._pool.capacity_bytes,
            num_pinned=len(self._leases),
            num_imported_tokens=self._imports.num_tokens,
        )

    def caps(self) -> EngineCaps:
        return EngineCaps(
            engine="torch",
            logprob_mode="processed",
            is_resume_exact=True,
            can_export_kv=self._config.kv_handoff != "off",
            weight_path="push",
            context_tokens=self._config.context_tokens,
        )

    async def step(self, lives: Sequence[Live]) -> list[Sampled]:
        """A pin is dropped where a request would have no slot for it."""
        num_wanted = sum(self._table.slot_of(live) is None for live in lives)
        while self._table.num_free < num_wanted and self._leases.drop_oldest():
            continue
        return await self._compute.run(self._step, lives)

    def expect(self, live: Live, on_ready: Callable[[], None]) -> None:
        self._imports.expect(live, self._desk.version, on_ready)

    def pin(self, live: Live) -> KVRef | None:
        if self._config.kv_handoff == "off" or (found := self._table.pin(live)) is None:
            return None
        slot, num_tokens = found
        return self._pin(live.request.execution, slot, live.ids[:num_tokens])

    def forget(self, live: Live) -> None:
        self._imports.forget(live)
        self._table.free(live)

    def _pin(
        self, execution: str, slot: int, ids: list[int], *, is_idle: bool = False
    ) -> KVRef | None:
        """None where no reader could reach it, or nothing is left to keep it with (memory, files,
        threads): it is computed then."""
        try:
            pin, ref = self._pool.pin(slot, len(ids)), self._leases.new_ref()
        except (BoundaryError, OSError, RuntimeError) as error:
            log.warning("not handed over: %s", error)
            self._table.unpin(slot)
            return None
        self._leases.add(ref, lambda: self._unpin(pin, slot))
        return KVRef(
            ref=ref,
            execution=execution,
            num_tokens=len(ids),
            digest=digest_of(ids),
            version=self._desk.version,
            model=self._kv_model,
            lease_s=self._config.kv_lease_s,
            place=pin.place,
            ids=ids if is_idle else [],
        )

    def _unpin(self, pin: Pin, slot: int) -> None:
        """No reader trusts the slot any more before it can be written."""
        pin.end()
        self._table.unpin(slot)

    def _step(self, lives: Sequence[Live]) -> list[Sampled]:
        """In the compute thread: some bytes of what is imported, then one forward over all decodes
        and some prefill chunks."""
        made = self._import(lives)
        ready = [live for live in lives if live.num_left > 0 and not self._imports.is_coming(live)]
        return [*made, *self._compute_step(ready)] if ready else made

    def _import(self, lives: Sequence[Live]) -> list[Sampled]:
        made, max_bytes = [], STEP_BYTES
        for live in lives:
            if max_bytes <= 0 or not self._imports.is_coming(live):
                continue
            taken, num_bytes = self._imports.advance(live, self._desk.version, max_bytes=max_bytes)
            max_bytes -= num_bytes
            if taken is not None:
                finish = Finish.LENGTH if live.num_left <= 0 else None
                made.append(Sampled(live, [], [], finish=finish, taken=taken))
        return made

    def _compute_step(self, lives: Sequence[Live]) -> list[Sampled]:
        started_s = time.perf_counter()
        with torch.inference_mode():
            live_of_slot = self._slots_of(lives)
            if not live_of_slot:
                return []
            batch = self._planner.plan(list(live_of_slot))
            hidden = self._decode(batch.ids, batch.positions, batch.attention)
            self._table.num_cached[batch.slots] += batch.num_computed
            self._num_prefill_tokens += batch.num_prefill_tokens
            if len(batch.sampled_slots):
                logits = self._model.lm_head(hidden[batch.sampled_rows])
                ids, logprobs = sample(logits, self._sampling_rows(batch))
        if batch.num_prefill_tokens >= MIN_PREFILL_TOKENS:
            took_s = time.perf_counter() - started_s
            self._imports.prefill.measured(batch.num_prefill_tokens, took_s)
        if len(batch.sampled_slots) == 0:
            return []
        return self._sampled(live_of_slot, batch.sampled_slots, ids, logprobs)

    def _slots_of(self, lives: Sequence[Live]) -> dict[int, Live]:
        """Who shares a prefix with one that is being computed waits for it without a slot."""
        slots: dict[int, Live] = {}
        for live in lives:
            slot = self._table.slot_of(live)
            if slot is None and not self._table.is_being_computed(live):
                slot = self._give_slot(live)
            if slot is not None:
                slots[slot] = live
        return slots

    def _give_slot(self, live: Live) -> int:
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
            min_p=table.min_p[slots],
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


def _kv_model(config: Any, shape: KVShape, dtype: torch.dtype) -> str:
    """Names what keys and values are of: architecture, every size, and the cache's layout."""
    words = config.to_diff_dict()
    words = {name: words[name] for name in sorted(words) if not name.startswith("_")}
    sizes = f"{shape.num_layers}x{shape.num_kv_heads}x{shape.head_dim} {dtype}".replace(
        "torch.", ""
    )
    of_config = hashlib.sha256(f"{config.model_type} {words}".encode()).hexdigest()[:16]
    return f"{config.model_type} {sizes} {of_config}"


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
