"""Tokens per second of the embedded engine against HF generate, in one process.

Run: `python benchmarks/engines.py [--model FOLDER] [--linked]`. Without a model it takes random
weights of the quickstart's size (0.69 M parameters). Absolute figures depend on the machine; the
ratio is what to compare. Rounds alternate between the two, and the best of each counts.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.engines.compute import ComputeThread
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.engines.torch_engine.model import load_model
from opengyre.seams.engine import GenerateRequest
from opengyre.transport.chunk_stream import collect
from opengyre.transport.engine_link import EngineServer, RemoteEngine

BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS = 40
NEW_TOKENS = 64
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--linked", action="store_true", help="ask through an engine link")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(asked.model) if asked.model else quickstart_sized_model()
    asyncio.run(compare(model, is_linked=asked.linked))


def quickstart_sized_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=769,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


async def compare(model: Any, *, is_linked: bool) -> None:
    compute = ComputeThread(on_start=lambda: torch.set_num_threads(1))
    config = TorchEngineConfig(max_running=max(BATCHES), context_tokens=256)
    engine = TorchEngine(model, config, compute)
    say(f"{'batch':>6} {'engine tok/s':>14} {'generate tok/s':>15} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder:
        async with (
            EngineServer(engine, f"unix:{folder}/e.sock") as server,
            RemoteEngine(server.address, name="engine") as remote,
        ):
            front = remote if is_linked else engine
            for batch in BATCHES:
                ours, theirs = await best_of_rounds(front, model, batch=batch)
                say(f"{batch:>6} {ours:>14.0f} {theirs:>15.0f} {ours / theirs:>6.2f}")
    compute.close()


async def best_of_rounds(front: Any, model: Any, *, batch: int) -> tuple[float, float]:
    """Best tokens/s of the engine and of generate."""
    ours, theirs = [], []
    for number in range(ROUNDS):
        prompts = torch.randint(0, model.config.vocab_size, (batch, PROMPT_TOKENS))
        ours.append(await engine_tokens_per_s(front, prompts.tolist(), seed=number))
        theirs.append(tokens_per_s(batch, lambda prompts=prompts: generate(model, prompts)))
    return max(ours), max(theirs)


async def engine_tokens_per_s(front: Any, prompts: list[list[int]], *, seed: int) -> float:
    requests = [
        GenerateRequest(
            request_id=f"r{seed}.{len(prompts)}.{row}",
            execution=f"e{row}",
            prompt_ids=prompt,
            max_new_tokens=NEW_TOKENS,
            seed=seed + row,
        )
        for row, prompt in enumerate(prompts)
    ]
    started_s = time.perf_counter()
    made = await asyncio.gather(*(collect(front.submit(one)) for one in requests))
    return sum(len(one.ids) for one in made) / (time.perf_counter() - started_s)


def tokens_per_s(batch: int, work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return batch * NEW_TOKENS / (time.perf_counter() - started_s)


@torch.inference_mode()
def generate(model: Any, prompts: torch.Tensor) -> None:
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
