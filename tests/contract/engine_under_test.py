"""The engines that the contract suite runs against, each with a reference it must agree with.

A subject makes an engine and new weights for it; its reference says what greedy ids and which
logprobs are right under given weights. Direct or through a link on a unix socket.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from opengyre.engines.compute import ComputeThread
from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine, pseudo_logprob
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.seams.engine import Chunk, Engine, EngineStats, GenerateRequest
from opengyre.transport.engine_link import RemoteEngine
from opengyre.transport.engine_server import EngineServer

CONTEXT_TOKENS = 96
MAX_RUNNING = 4
MAX_WAITING = 8
NUM_WORDS = 97
DEADLINE_S = 60.0


class Subject(Protocol):
    name: str

    def make(self, compute: ComputeThread) -> Engine: ...

    def weights(self, seed: int) -> dict[str, Any]: ...

    def greedy(self, prompt: list[int], num_tokens: int, *, weights_seed: int) -> list[int]: ...

    def logprobs(
        self, request: GenerateRequest, ids: list[int], *, weights_seed: int
    ) -> list[float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedSubject:
    name: str = "scripted"

    def make(self, compute: ComputeThread) -> Engine:
        config = ScriptedConfig(
            tokens_per_s=500.0,
            max_running=MAX_RUNNING,
            max_waiting=MAX_WAITING,
            context_tokens=CONTEXT_TOKENS,
            weight_names=["layer.a", "layer.b"],
        )
        return ScriptedEngine(_counting_answer, config)

    def weights(self, seed: int) -> dict[str, Any]:
        draw = np.random.default_rng(seed)
        return {name: draw.standard_normal(3) for name in ("layer.a", "layer.b")}

    def greedy(self, prompt: list[int], num_tokens: int, *, weights_seed: int) -> list[int]:
        return _counting_answer(prompt, 0)[:num_tokens]

    def logprobs(
        self, request: GenerateRequest, ids: list[int], *, weights_seed: int
    ) -> list[float]:
        start = len(request.prompt_ids)
        places = range(start, start + len(ids))
        return [pseudo_logprob(request.seed, place, weights_seed) for place in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSubject:
    """Tiny random models; `weights_seed` doubles as the policy_version in the suite."""

    name: str
    family: str
    is_tied: bool
    _models: dict[int, Any] = field(default_factory=dict)

    def make(self, compute: ComputeThread) -> Engine:
        config = TorchEngineConfig(
            max_running=MAX_RUNNING,
            max_waiting=MAX_WAITING,
            num_kv_slots=2 * MAX_RUNNING,
            context_tokens=CONTEXT_TOKENS,
            step_tokens=24,
        )
        return TorchEngine(tiny_model(self.family, is_tied=self.is_tied, seed=0), config, compute)

    def model(self, seed: int) -> Any:
        if seed not in self._models:
            self._models[seed] = tiny_model(self.family, is_tied=self.is_tied, seed=seed)
        return self._models[seed]

    def weights(self, seed: int) -> dict[str, Any]:
        return {name: one.detach() for name, one in self.model(seed).named_parameters()}

    def greedy(self, prompt: list[int], num_tokens: int, *, weights_seed: int) -> list[int]:
        with torch.inference_mode():
            made = self.model(weights_seed).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        ids: list[int] = made[0, len(prompt) :].tolist()
        return ids

    def logprobs(
        self, request: GenerateRequest, ids: list[int], *, weights_seed: int
    ) -> list[float]:
        prompt = request.prompt_ids
        with torch.inference_mode():
            logits = self.model(weights_seed)(torch.tensor([prompt + ids])).logits
        rows = logits[0, len(prompt) - 1 : -1] / (request.temperature or 1.0)
        chosen = rows.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
        values: list[float] = chosen[:, 0].tolist()
        return values


SUBJECTS: dict[str, Subject] = {
    one.name: one
    for one in (
        ScriptedSubject(),
        TorchSubject(name="qwen3-tied", family="qwen3", is_tied=True),
        TorchSubject(name="qwen3-untied", family="qwen3", is_tied=False),
        TorchSubject(name="llama-tied", family="llama", is_tied=True),
        TorchSubject(name="llama-untied", family="llama", is_tied=False),
        TorchSubject(name="qwen2-tied", family="qwen2", is_tied=True),
        TorchSubject(name="mistral-untied", family="mistral", is_tied=False),
    )
}


FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family: str, *, is_tied: bool, seed: int, positions: int = 128) -> Any:
    """Random weights, biases and norms too, large enough that greedy ids vary from place to
    place."""
    make_config, make_model = FAMILIES[family]
    sizes: dict[str, Any] = {
        "vocab_size": NUM_WORDS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": positions,
        "tie_word_embeddings": is_tied,
    }
    if family == "mistral":
        sizes["sliding_window"] = None
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = make_model(make_config(**sizes))
        for weight in model.parameters():
            drawn = 7 * weight if weight.ndim == 2 else 0.3 * torch.randn_like(weight)
            weight.add_(drawn)
    return model.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """`front` takes requests (directly or through a link); `engine` is the engine itself."""

    subject: Subject
    engine: Any
    front: Any
    server: EngineServer | None

    async def stats(self) -> EngineStats:
        stats: EngineStats = self.engine.stats()
        return stats

    async def update(self, version: int) -> None:
        """Publish the weights of seed `version` as `version` and serve them."""
        await self.engine.pause()
        await self.engine.begin_update(version)
        for name, tensor in self.subject.weights(version).items():
            await self.engine.push(name, tensor)
        await self.engine.commit(version)
        await self.engine.resume()

    async def until_idle(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (stats := await self.stats()).num_running or stats.num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@asynccontextmanager
async def open_bench(subject: Subject, folder: Path, *, is_linked: bool) -> AsyncIterator[Bench]:
    compute = ComputeThread(on_start=lambda: torch.set_num_threads(1))
    engine = subject.make(compute)
    try:
        async with asyncio.timeout(DEADLINE_S):
            if not is_linked:
                yield Bench(subject=subject, engine=engine, front=engine, server=None)
                return
            async with (
                EngineServer(engine, f"unix:{folder}/e.sock") as server,
                RemoteEngine(server.address, name="e") as front,
            ):
                yield Bench(subject=subject, engine=engine, front=front, server=server)
    finally:
        await engine.pause()
        compute.close()


def request(number: int, prompt: list[int], num_tokens: int, **settings: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        execution="e000001",
        prompt_ids=prompt,
        max_new_tokens=num_tokens,
        **settings,
    )


def prompt_of(num_tokens: int, *, seed: int = 0) -> list[int]:
    draw = np.random.default_rng([seed, num_tokens])
    ids: list[int] = draw.integers(0, NUM_WORDS, num_tokens).tolist()
    return ids


async def all_chunks(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def queued_chunks(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    """The rest of a stream whose terminal chunk is queued already: reading it never waits."""
    reading = asyncio.ensure_future(all_chunks(chunks))
    await asyncio.sleep(0)
    assert reading.done(), "the terminal chunk was not queued"
    return await reading


def _counting_answer(prompt_ids: list[int], seed: int) -> list[int]:
    """Depends on the last id alone, so it goes on the same from any point. Never ends by itself
    within the context."""
    ids, last = [], prompt_ids[-1]
    for _ in range(CONTEXT_TOKENS):
        last = (last * 7 + 3) % NUM_WORDS
        ids.append(last)
    return ids
