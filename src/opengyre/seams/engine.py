"""The rollout engine seam: token ids in, token ids and logprobs out. Text never crosses it.

Implementations: the embedded torch engine, the scripted engine, and the link that carries this
seam to another process. Invariants: each request gets exactly one terminal chunk (its `finish`
is set) which carries nothing that was not streamed; weights are written only while paused.
"""

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from opengyre.seams.kv import KVRef, KVRelease, KVTaken

ENGINE_LOST = "engine lost"
"""Why a request ended at whoever asked an engine that is gone."""


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    FROZEN = "frozen"
    CANCELLED = "cancelled"
    ERROR = "error"
    REFUSED = "refused"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Sampling at absolute position p (prompt length + tokens so far) is keyed by
    (seed, p), so a request continued from prompt + tokens so far is identical to an unbroken one.

    `kv`: a prefix of `prompt_ids` that another engine holds. The engine reads it, or computes it,
    and says which by a chunk with `taken`, before its first ids.
    """

    request_id: str
    execution: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: list[int] = []
    kv: KVRef | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled ids with their logprobs (same length), all of one policy_version.

    A stop id that was sampled is in `ids`. `reason` is words, set with Finish.ERROR, after which
    another try may succeed, and with REFUSED: the request itself is what the engine cannot serve.
    `kv` comes with Finish.FROZEN: the pinned prefix to go on from; `taken` alone, in a chunk
    without ids: the engine has what it wants of the request's `kv`.
    """

    ids: list[int] = []
    logprobs: list[float] = []
    policy_version: int = 0
    finish: Finish | None = None
    reason: str = ""
    kv: KVRef | None = None
    taken: KVTaken | None = None


class EngineCaps(msgspec.Struct, frozen=True, kw_only=True):
    """`logprob_mode`: raw (T = 1) or processed (of the sampled distribution)."""

    engine: str
    logprob_mode: str
    is_resume_exact: bool
    can_export_kv: bool
    weight_path: str
    context_tokens: int


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Health is progress: `num_generated_tokens` only grows while work is running. `failure`:
    words of the step that broke it; it answers errors until a full load. `kv_capacity_bytes`: what
    the KV memory may hold, 0 while released; `num_pinned` prefixes are under a lease."""

    num_running: int
    num_waiting: int
    kv_used_bytes: int
    version: int
    num_generated_tokens: int
    num_prefill_tokens: int = 0
    num_reused_tokens: int = 0
    failure: str = ""
    kv_capacity_bytes: int = 0
    num_pinned: int = 0
    num_imported_tokens: int = 0


class RequestEngine(Protocol):
    """What a gateway needs of an engine, here or in another process: requests, not weights."""

    def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request up to and including its terminal chunk."""
        ...

    async def freeze(self, request_id: str, *, keeps_kv: bool = False) -> None:
        """Idempotent. Returns when no more tokens can be written for it and its terminal chunk
        (`frozen`) was queued. Unknown ids are fine. `keeps_kv` pins what is cached of it under a
        lease, where the engine can; the terminal chunk then has the reference."""
        ...

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        """`freeze` for everything running or waiting."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Like freeze, with terminal chunk `cancelled`."""
        ...

    async def import_kv(self, ref: KVRef) -> KVTaken:
        """Cache an idle prefix (`ref.ids`) that another engine holds, so that the next turn finds
        it. What cannot be read is none of it, with the reason; never raises for that."""
        ...

    async def release_kv(self, ref: str) -> KVRelease:
        """End a pin. Idempotent."""
        ...

    def caps(self) -> EngineCaps: ...


class Engine(RequestEngine, Protocol):
    """The whole seam, as the process that holds the weights sees it."""

    async def pause(self) -> None:
        """After it returns no forward runs and weights may be written."""
        ...

    async def resume(self) -> None: ...

    async def begin_update(self, version: int) -> None:
        """Only while paused. From here until `commit` the engine is unroutable."""
        ...

    async def push(self, name: str, tensor: Any) -> None:
        """Write one named weight in place. `tensor` is a torch tensor or a numpy array."""
        ...

    async def commit(self, version: int) -> None:
        """All or nothing: every weight was pushed, else BoundaryError and the engine stays
        unroutable until a full load. Empties every prefix cache."""
        ...

    async def export_kv(self) -> list[KVRef]:
        """Pin the cached prefixes of executions of which nothing runs, each with its `ids`; none
        where the engine cannot or config says no."""
        ...

    async def release(self) -> None:
        """Free the KV memory (the cell leaves rollout), once every pin ended, at the latest with
        its lease. Nothing may be running."""
        ...

    async def restore(self) -> None: ...

    def stats(self) -> EngineStats: ...
