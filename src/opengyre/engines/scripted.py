"""The scripted engine: answers from a pure function, at a set speed, behind the real seam.

Ships for tests and demos. Owns: emission in real time, pseudo logprobs. Must not know: models.
Invariants: ids depend on (prompt, seed) alone, logprobs on (seed, position, version); a request
continued from prompt + tokens so far gets exactly the rest, if `respond` is continuation-aware
(`text_policy` makes such a one). It hands prefixes over by the whole protocol; there are no bytes.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from opengyre.engines.checksum import checksum_of_array, digest_of
from opengyre.engines.desk import Desk, Live, Sampled
from opengyre.engines.handoff import import_request, refusal_of, taken_by
from opengyre.engines.leases import Leases
from opengyre.seams.engine import EngineCaps, EngineStats, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVPlace, KVRef, KVRelease, KVTaken
from opengyre.seams.weights import combined
from opengyre.transport.chunk_stream import ChunkReader

Respond = Callable[[list[int], int], list[int]]
MODEL = "scripted"
_MASK_64 = 2**64 - 1


class ScriptedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens_per_s` is the speed of each request; 0 is as fast as possible, one token a step.

    `stop_ids` end a request beside its own. `weight_names` must all be pushed by an update.
    `name` makes references to prefixes unique over engines and lives.
    """

    tokens_per_s: float = 0.0
    max_running: int = 8
    max_waiting: int = 4096
    context_tokens: int = 4096
    version: int = 0
    stop_ids: list[int] = []
    weight_names: list[str] = []
    kv_bytes_per_token: int = 64
    name: str = ""
    kv_handoff: str = "off"
    kv_lease_s: float = 10.0
    kv_handoff_idle: bool = False


class ScriptedEngine:
    """`respond(prompt ids, seed)` returns the remaining ids of the answer; it must be pure.

    A ValueError of `respond` ends that request with an `error` chunk.
    """

    def __init__(self, respond: Respond, config: ScriptedConfig | None = None) -> None:
        self._config = config or ScriptedConfig()
        self._respond = respond
        self._rests: dict[Live, list[int]] = {}
        self._due_s = 0.0
        self._pushed: dict[str, int] = {}
        self._update: int | None = None
        self._is_released = False
        self._num_prefill_tokens = 0
        self._checksum = 0
        self._leases = Leases(name=self._config.name, lease_s=self._config.kv_lease_s)
        self._pinned: dict[str, int] = {}
        self._idle: dict[str, list[int]] = {}
        self._arrived: dict[Live, KVTaken] = {}
        self._num_imported_tokens = 0
        self._num_reused_tokens = 0
        self._desk = Desk(
            self,
            max_running=self._config.max_running,
            max_waiting=self._config.max_waiting,
            context_tokens=self._config.context_tokens,
            version=self._config.version,
        )

    @property
    def checksum(self) -> int:
        """Of the tensors of the last commit, in the order they were pushed."""
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
        idle = {who: ids for who, ids in self._idle.items() if self._desk.is_of_nobody(who)}
        return [self._pin(who, ids, ids=ids) for who, ids in idle.items()]

    async def pause(self) -> None:
        await self._desk.pause()

    async def resume(self) -> None:
        if self._is_released:
            raise BoundaryError("engine", "cannot resume: KV is released", retryable=False)
        self._desk.resume()

    async def begin_update(self, version: int) -> None:
        self._desk.begin_update()
        self._leases.drop_all()
        self._idle.clear()
        self._update = version
        self._pushed = {}

    async def push(self, name: str, tensor: Any) -> None:
        """Keeps only the checksum of `tensor` (anything numpy can view). Raises BoundaryError
        outside an update and for numbers that are not finite."""
        if self._update is None:
            raise BoundaryError("engine", "push outside an update", retryable=False)
        array = np.asarray(tensor)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            self._update = None
            raise BoundaryError("engine", f"weight {name} is not finite", retryable=False)
        self._pushed[name] = checksum_of_array(array)

    async def commit(self, version: int) -> None:
        missing = [name for name in self._config.weight_names if name not in self._pushed]
        update, self._update = self._update, None
        if update != version or missing:
            what = f"missing weights {missing}" if missing else f"no update to {version} began"
            raise BoundaryError("engine", what, retryable=False)
        self._checksum = combined(self._pushed.values())
        self._desk.commit_update(version)

    async def release(self) -> None:
        if self._desk.num_running:
            raise BoundaryError("engine", "requests run; freeze them first", retryable=False)
        await self._desk.pause()
        await self._leases.wait_none()
        self._idle.clear()
        self._is_released = True

    async def restore(self) -> None:
        """KV is there again; the engine stays paused until `resume`."""
        self._is_released = False

    def stats(self) -> EngineStats:
        num_tokens = sum(len(live.ids) for live in self._rests) + sum(self._pinned.values())
        return EngineStats(
            num_running=self._desk.num_running,
            num_waiting=self._desk.num_waiting,
            kv_used_bytes=num_tokens * self._config.kv_bytes_per_token,
            version=self._desk.version,
            num_generated_tokens=self._desk.num_generated_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            failure=self._desk.failure,
            kv_capacity_bytes=self._capacity_bytes(),
            num_pinned=len(self._leases),
            num_imported_tokens=self._num_imported_tokens,
            num_reused_tokens=self._num_reused_tokens,
        )

    def _capacity_bytes(self) -> int:
        if self._is_released:
            return 0
        num_tokens = self._config.max_running * self._config.context_tokens
        return num_tokens * self._config.kv_bytes_per_token

    def caps(self) -> EngineCaps:
        return EngineCaps(
            engine="scripted",
            logprob_mode="processed",
            is_resume_exact=True,
            can_export_kv=self._config.kv_handoff != "off",
            weight_path="push",
            context_tokens=self._config.context_tokens,
        )

    async def step(self, lives: Sequence[Live]) -> list[Sampled]:
        """One emission for each live: the tokens that are due since the last one."""
        arrived = [
            self._take(live) for live in lives if live.request.kv and live not in self._arrived
        ]
        if arrived:
            return arrived
        num_tokens = await self._wait_due()
        return [self._emit(live, num_tokens) for live in lives]

    def expect(self, live: Live, on_ready: Callable[[], None]) -> None:
        on_ready()

    def pin(self, live: Live) -> KVRef | None:
        if self._config.kv_handoff == "off" or self._rests.pop(live, None) is None:
            return None
        return self._pin(live.request.execution, live.ids)

    def forget(self, live: Live) -> None:
        if self._rests.pop(live, None) is not None:
            self._keep_idle(live)
        self._arrived.pop(live, None)

    def _keep_idle(self, live: Live) -> None:
        """As cache for the next turn of its execution, of as many executions as may run."""
        self._idle.pop(live.request.execution, None)
        self._idle[live.request.execution] = list(live.ids)
        while len(self._idle) > self._config.max_running:
            del self._idle[next(iter(self._idle))]

    def _pin(self, execution: str, covered: list[int], *, ids: list[int] | None = None) -> KVRef:
        ref = self._leases.new_ref()
        self._pinned[ref] = len(covered)
        self._leases.add(ref, lambda: self._unpin(ref))
        num_bytes = len(covered) * self._config.kv_bytes_per_token
        return KVRef(
            ref=ref,
            execution=execution,
            num_tokens=len(covered),
            digest=digest_of(covered),
            version=self._desk.version,
            model=MODEL,
            lease_s=self._config.kv_lease_s,
            place=KVPlace(kind=MODEL, address="", key=ref, num_ranges=1, range_bytes=num_bytes),
            ids=ids or [],
        )

    async def _wait_due(self) -> int:
        speed = self._config.tokens_per_s
        if speed <= 0:
            await asyncio.sleep(0)
            return 1
        loop = asyncio.get_running_loop()
        if not self._rests:
            self._due_s = loop.time() + 1 / speed
        await asyncio.sleep(max(0.0, self._due_s - loop.time()))
        num_tokens = 1 + max(0, int((loop.time() - self._due_s) * speed))
        self._due_s += num_tokens / speed
        return num_tokens

    def _unpin(self, ref: str) -> None:
        del self._pinned[ref]

    def _take(self, live: Live) -> Sampled:
        """There is nothing to read but the reference."""
        ref = live.request.kv
        assert ref is not None, "taken without a reference"
        reason = "handoff is off" if self._config.kv_handoff == "off" else ""
        reason = reason or refusal_of(ref, live.ids, version=self._desk.version, model=MODEL)
        num_tokens = 0 if reason else ref.num_tokens
        taken = KVTaken(
            ref=ref.ref, num_tokens=num_tokens, version=self._desk.version, reason=reason
        )
        self._arrived[live] = taken
        self._num_imported_tokens += num_tokens
        is_idle = live.num_left <= 0
        if is_idle and not reason:
            self._keep_idle(live)
        return Sampled(live, [], [], finish=Finish.LENGTH if is_idle else None, taken=taken)

    def _emit(self, live: Live, num_tokens: int) -> Sampled:
        rest = self._rests.get(live)
        if rest is None:
            try:
                rest = list(self._respond(list(live.ids), live.request.seed))
            except ValueError as error:
                return Sampled(live, [], [], finish=Finish.ERROR, reason=str(error))
            self._num_prefill_tokens += len(live.ids) - self._num_cached(live)
            self._rests[live] = rest
        room = self._config.context_tokens - len(live.ids)
        ids = self._until_stop(live, rest[: min(num_tokens, live.num_left, room)])
        del rest[: len(ids)]
        is_done = not rest or (bool(ids) and ids[-1] in self._config.stop_ids)
        logprobs = [
            pseudo_logprob(live.request.seed, len(live.ids) + k, self._desk.version)
            for k in range(len(ids))
        ]
        return Sampled(live, ids, logprobs, finish=Finish.STOP if is_done else None)

    def _num_cached(self, live: Live) -> int:
        """What was handed over of its prompt, or of its execution's last turn."""
        idle = self._idle.pop(live.request.execution, [])
        num_idle = len(idle) if live.ids[: len(idle)] == idle else 0
        self._num_reused_tokens += num_idle
        taken = self._arrived.get(live)
        return max(num_idle, taken.num_tokens if taken else 0)

    def _until_stop(self, live: Live, ids: list[int]) -> list[int]:
        for k, token in enumerate(ids):
            if token in live.stop_ids or token in self._config.stop_ids:
                return ids[: k + 1]
        return ids


def pseudo_logprob(seed: int, position: int, version: int) -> float:
    """A number in (-2, 0], the same for the same arguments (splitmix64's finalizer)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + version) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return -2.0 * ((x ^ (x >> 31)) >> 11) / 2**53


class TextTokenizer(Protocol):
    """The two calls `text_policy` needs; special tokens are kept by `decode`."""

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...


def text_policy(
    tokenizer: TextTokenizer,
    respond_text: Callable[[str, int], str],
    *,
    generation_prompt: str = "<|im_start|>assistant\n",
    end_of_turn: str = "<|im_end|>",
) -> Respond:
    """A continuation-aware `respond` from a function of text.

    `respond_text(text, seed)` gets the decoded prompt up to and including its last generation
    prompt, and returns the whole answer without its end marker. What the prompt already holds of
    that answer is left out, exact at every token; a prompt that holds something else raises
    ValueError.
    """
    marker = tokenizer.encode(generation_prompt)
    end = tokenizer.encode(end_of_turn)

    def respond(prompt_ids: list[int], seed: int) -> list[int]:
        start = _end_of_last(marker, prompt_ids)
        answer = respond_text(tokenizer.decode(prompt_ids[:start]), seed)
        whole = tokenizer.encode(answer) + end
        so_far = prompt_ids[start:]
        if whole[: len(so_far)] != so_far:
            raise ValueError("the prompt ends in an answer that this policy does not give")
        return whole[len(so_far) :]

    return respond


def _end_of_last(marker: list[int], ids: list[int]) -> int:
    for start in range(len(ids) - len(marker), -1, -1):
        if ids[start : start + len(marker)] == marker:
            return start + len(marker)
    raise ValueError("the prompt has no generation prompt")
