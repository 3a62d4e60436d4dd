"""Engines that hand prefixes over, for the tests of the handoff: pairs, streams read to their end.

A kind is an engine, a model family and the plane its pins are read by. Its oracle says what is
right under given weights without any engine.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from engine_under_test import NUM_WORDS, SUBJECTS, Subject, tiny_model

from opengyre.engines.compute import ComputeThread
from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.seams.engine import Chunk, Finish, GenerateRequest
from opengyre.seams.kv import KVRef, KVTaken

CONTEXT_TOKENS = 128
MAX_RUNNING = 4
DEADLINE_S = 60.0
LOGPROB_GAP = 1e-5
LAST_VERSION = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`family` is empty for the scripted engine, whose pins have no bytes."""

    name: str
    oracle: str
    family: str = ""
    plane: str = ""

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.oracle]

    @property
    def has_bytes(self) -> bool:
        return bool(self.plane)


KINDS = {
    one.name: one
    for one in (
        Kind(name="scripted", oracle="scripted"),
        Kind(name="qwen3-shm", oracle="qwen3-tied", family="qwen3", plane="shm"),
        Kind(name="qwen3-tcp", oracle="qwen3-tied", family="qwen3", plane="tcp"),
        Kind(name="llama-shm", oracle="llama-tied", family="llama", plane="shm"),
        Kind(name="llama-tcp", oracle="llama-tied", family="llama", plane="tcp"),
    )
}
SCRIPTED, TORCH = KINDS["scripted"], [one for one in KINDS.values() if one.has_bytes]


def kind_params(*names: str) -> list[Any]:
    """Names of kinds as parameters; each family and each plane is quick once."""
    slow = pytest.mark.slow
    return [
        one if one in ("scripted", "qwen3-shm", "llama-tcp") else pytest.param(one, marks=slow)
        for one in names or KINDS
    ]


def make_engine(kind: Kind, compute: ComputeThread, *, name: str, **settings: Any) -> Any:
    """`settings` are config fields; `model` and `tokens_per_s` where the engine has such."""
    settings = {"kv_handoff": "on", "max_running": MAX_RUNNING, **settings}
    settings.setdefault("context_tokens", CONTEXT_TOKENS)
    model, speed = settings.pop("model", None), settings.pop("tokens_per_s", 2000.0)
    if not kind.has_bytes:
        names = ["layer.a", "layer.b"]
        config = ScriptedConfig(name=name, tokens_per_s=speed, weight_names=names, **settings)
        return ScriptedEngine(counting_answer, config)
    model = tiny_model(kind.family, is_tied=True, seed=0) if model is None else model
    settings = {"num_kv_slots": 2 * MAX_RUNNING, "step_tokens": 24, **settings}
    fields = {"kv_plane": kind.plane, "name": name, **settings}
    known = {one.name for one in msgspec.structs.fields(TorchEngineConfig)}
    chosen = {key: one for key, one in fields.items() if key in {*known, *settings}}
    return TorchEngine(model, TorchEngineConfig(**chosen), compute)


@asynccontextmanager
async def engine_of(kind: Kind, **settings: Any) -> AsyncIterator[Any]:
    """One engine with a compute thread of its own; at the end its memory is given back."""
    compute = ComputeThread(on_start=lambda: torch.set_num_threads(1))
    settings.setdefault("name", "e")
    engine = make_engine(kind, compute, **settings)
    try:
        yield engine
    finally:
        await engine.freeze_all()
        await engine.pause()
        await engine.begin_update(LAST_VERSION)
        await engine.release()
        compute.close()


@asynccontextmanager
async def engines_of(kind: Kind, num_engines: int, **settings: Any) -> AsyncIterator[list[Any]]:
    """Engines with equal weights."""
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        yield [
            await stack.enter_async_context(engine_of(kind, name=f"e{number}", **settings))
            for number in range(num_engines)
        ]


def play(scene: Callable[[list[Any]], Awaitable[None]], kind: Kind, num: int, **more: Any) -> None:
    async def main() -> None:
        async with engines_of(kind, num, **more) as engines:
            await scene(engines)

    asyncio.run(main())


def counting_answer(prompt_ids: list[int], seed: int) -> list[int]:
    """Depends on the last id alone, so it goes on the same from any point; it never ends."""
    ids, last = [], prompt_ids[-1]
    for _ in range(CONTEXT_TOKENS):
        last = (last * 7 + 3) % NUM_WORDS
        ids.append(last)
    return ids


@dataclass(slots=True, kw_only=True)
class Heard:
    """A stream as far as it was read; `end` is its terminal chunk."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    taken: KVTaken | None = None
    end: Chunk | None = None

    @property
    def finish(self) -> Finish | None:
        return self.end.finish if self.end else None

    @property
    def ref(self) -> KVRef:
        assert self.end is not None
        assert self.end.kv is not None, self.end
        return self.end.kv

    def note(self, chunk: Chunk) -> None:
        """Raises AssertionError for a chunk that breaks the seam's promises."""
        assert self.end is None, f"{chunk} after the terminal chunk"
        assert len(chunk.ids) == len(chunk.logprobs)
        if chunk.taken is not None:
            assert not chunk.ids, "ids in the chunk that says what was taken"
            assert self.taken is None, "two words about what was taken"
            assert not self.ids, "taken after the first ids"
            assert chunk.finish is None
            self.taken = chunk.taken
        assert chunk.kv is None or chunk.finish is Finish.FROZEN, chunk
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        if chunk.ids:
            self.versions.add(chunk.policy_version)
        if chunk.finish is not None:
            assert not chunk.ids, "ids in the terminal chunk"
            self.end = chunk


async def hear(chunks: AsyncIterator[Chunk], heard: Heard | None = None) -> Heard:
    """Read to the terminal chunk; what comes after it is an error too."""
    heard = heard or Heard()
    async for chunk in chunks:
        heard.note(chunk)
    assert heard.end is not None, "the stream ended without a terminal chunk"
    return heard


async def hear_some(chunks: AsyncIterator[Chunk], num_tokens: int) -> Heard:
    heard = Heard()
    while len(heard.ids) < num_tokens and heard.end is None:
        heard.note(await anext(chunks))
    return heard


def ask(prompt: list[int], num_tokens: int, *, name: str = "r0", **more: Any) -> GenerateRequest:
    fields = {"execution": "e000001", "temperature": 0.0, **more}
    return GenerateRequest(request_id=name, prompt_ids=prompt, max_new_tokens=num_tokens, **fields)


async def cut(engine: Any, asked: GenerateRequest, num_tokens: int) -> Heard:
    """Run `asked` until it has at least `num_tokens`, then freeze it and keep its KV."""
    stream = engine.submit(asked)
    heard = await hear_some(stream, num_tokens)
    await engine.freeze(asked.request_id, keeps_kv=True)
    heard = await hear(stream, heard)
    assert heard.finish is Finish.FROZEN, heard.end
    return heard


def rest_of(asked: GenerateRequest, heard: Heard, *, kv: KVRef | None) -> GenerateRequest:
    """What is left of `asked` after what was heard of it."""
    return msgspec.structs.replace(
        asked,
        request_id=f"{asked.request_id}+",
        prompt_ids=asked.prompt_ids + heard.ids,
        max_new_tokens=asked.max_new_tokens - len(heard.ids),
        kv=kv,
    )


def forged(ref: KVRef, **fields: Any) -> KVRef:
    """`ref` with other fields; those of a place are named as such."""
    of_place = {key: fields.pop(key) for key in list(fields) if key in _PLACE_FIELDS}
    place = msgspec.structs.replace(ref.place, **of_place)
    return msgspec.structs.replace(ref, place=place, **fields)


_PLACE_FIELDS = {"kind", "address", "key", "num_ranges", "range_bytes"}


async def publish(engine: Any, kind: Kind, version: int) -> None:
    """Load the weights of seed `version` as `version` and serve them."""
    await engine.pause()
    await engine.begin_update(version)
    for name, tensor in kind.subject.weights(version).items():
        await engine.push(name, tensor)
    await engine.commit(version)
    await engine.resume()


async def until(is_so: Callable[[], bool], *, what: str, within_s: float = 10.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never so: {what}") from None


async def nothing_left(engine: Any, *, within_s: float = 10.0) -> None:
    """No pin, nothing running, the memory free once it is released; then it serves again."""
    await until(lambda: engine.stats().num_pinned == 0, what="no pin", within_s=within_s)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.failure) == (0, 0, "")
    async with asyncio.timeout(within_s):
        await engine.pause()
        await engine.release()
    assert (engine.stats().kv_used_bytes, engine.stats().kv_capacity_bytes) == (0, 0)
    await engine.restore()
    await engine.resume()
    made = await hear(engine.submit(ask([5, 6, 7], 3, name="after", execution="e000099")))
    assert (made.finish, len(made.ids)) == (Finish.LENGTH, 3)
