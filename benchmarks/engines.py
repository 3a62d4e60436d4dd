"""Tokens per second of the embedded engine beside transformers, and what reuse of prefixes saves.

Run: `python benchmarks/engines.py [speed|turns|group] [--model tiny|smollm2|FOLDER]`. All in one
process with one torch thread. `speed`: new tokens of requests that start together, against
`generate` and the continuous batching of transformers; rounds alternate between the three, and the
best of each counts. `turns`: an execution of 20 turns, with its cache and with none. `group`:
siblings with one prompt, and as many requests with prompts of their own. The ratios are what to
compare.
"""

import argparse
import asyncio
import copy
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch
from moves_bench.models import HELP, TINY, chosen, model_of
from transformers import ContinuousBatchingConfig, GenerationConfig

from opengyre.engines.compute import ComputeThread
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.seams.engine import GenerateRequest
from opengyre.transport.chunk_stream import collect
from opengyre.transport.engine_link import RemoteEngine
from opengyre.transport.engine_server import EngineServer

PROMPT_TOKENS = 40
NEW_TOKENS = 64
FIRST_TURN_TOKENS, TURN_TOKENS, ANSWER_TOKENS, NUM_TURNS = 200, 32, 16, 20
GROUP_SIZE, GROUP_PROMPT_TOKENS, GROUP_NEW_TOKENS = 16, 512, 16
CONTEXT_TOKENS = 256
LONG_CONTEXT_TOKENS = 2048
PAGE_TOKENS = 128
STEP_TOKENS = 512
ANSWER_S = 300.0

_numbers = itertools.count()
Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", default="speed", choices=["speed", "turns", "group"])
    parser.add_argument("--model", type=chosen, default=TINY, help=HELP)
    parser.add_argument("--linked", action="store_true", help="ask through an engine link")
    parser.add_argument("--batches", type=_numbers_of, default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(asked.model, positions=LONG_CONTEXT_TOKENS)
    model.generation_config.eos_token_id = None
    if asked.mode == "speed":
        asyncio.run(compare_speed(model, asked.batches, rounds=asked.rounds, linked=asked.linked))
    else:
        asyncio.run(compare_turns(model) if asked.mode == "turns" else compare_group(model))


def _numbers_of(words: str) -> list[int]:
    return [int(one) for one in words.split(",")]


@asynccontextmanager
async def open_engine(model: Any, *, running: int, context_tokens: int) -> AsyncIterator[Any]:
    compute = ComputeThread(on_start=lambda: torch.set_num_threads(1))
    config = TorchEngineConfig(
        max_running=running, context_tokens=context_tokens, step_tokens=STEP_TOKENS
    )
    try:
        yield TorchEngine(model, config, compute)
    finally:
        compute.close()


async def compare_speed(model: Any, batches: list[int], *, rounds: int, linked: bool) -> None:
    columns = ("concurrent", "engine", "generate", "continuous", "/ generate", "/ continuous")
    say("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    async with (
        open_engine(model, running=max(batches), context_tokens=CONTEXT_TOKENS) as engine,
        open_front(engine, linked=linked) as front,
    ):
        with open_continuous(model, running=max(batches)) as continuous:
            for batch in batches:
                made = [await one_round(front, model, continuous, batch) for _ in range(rounds)]
                ours, theirs, paged = (
                    batch * NEW_TOKENS / min(one) for one in zip(*made, strict=True)
                )
                say(
                    f"| {batch} | {ours:,.0f} | {theirs:,.0f} | {paged:,.0f} "
                    f"| {ours / theirs:.2f} | {ours / paged:.2f} |"
                )


async def one_round(
    front: Any, model: Any, continuous: Callable[[Prompts], None], batch: int
) -> list[float]:
    """Seconds of the engine, of `generate` and of continuous batching."""
    prompts = random_prompts(model, batch, PROMPT_TOKENS)
    return [
        await seconds(ask(front, prompts, NEW_TOKENS)),
        await seconds(asyncio.to_thread(generate, model, prompts)),
        await seconds(asyncio.to_thread(continuous, prompts)),
    ]


@asynccontextmanager
async def open_front(engine: Any, *, linked: bool) -> AsyncIterator[Any]:
    if not linked:
        yield engine
        return
    with tempfile.TemporaryDirectory() as folder:
        async with (
            EngineServer(engine, f"unix:{folder}/e.sock") as server,
            RemoteEngine(server.address, name="engine") as remote,
        ):
            yield remote


async def compare_turns(model: Any) -> None:
    """Each turn's prompt is all before it and some tokens of a tool."""
    say("| an execution of 20 turns | seconds | prefilled tokens |\n|---|---|---|")
    figures = []
    for is_reused in (True, False):
        async with open_engine(model, running=2, context_tokens=LONG_CONTEXT_TOKENS) as engine:
            took_s = await run_turns(engine, model, is_reused=is_reused)
            figures.append((took_s, engine.stats().num_prefill_tokens))
        name = "with its prefix cached" if is_reused else "with an empty cache each turn"
        say(row_of(name, figures[-1]))
    say(ratio_row(figures))


async def run_turns(engine: Any, model: Any, *, is_reused: bool) -> float:
    """Seconds that the turns took, without what it takes to empty the cache."""
    torch.manual_seed(1)
    prompt, took_s = random_prompts(model, 1, FIRST_TURN_TOKENS)[0], 0.0
    for _ in range(NUM_TURNS):
        started_s = time.perf_counter()
        [answer] = await ask(engine, [prompt], ANSWER_TOKENS)
        took_s += time.perf_counter() - started_s
        prompt = prompt + answer + random_prompts(model, 1, TURN_TOKENS)[0]
        if not is_reused:
            await engine.release()
            await engine.restore()
            await engine.resume()
    return took_s


async def compare_group(model: Any) -> None:
    what = f"{GROUP_SIZE} requests of {GROUP_PROMPT_TOKENS} prompt tokens at once"
    say(f"| {what} | seconds | prefilled tokens |\n|---|---|---|")
    figures = []
    for is_shared in (True, False):
        prompts = random_prompts(model, GROUP_SIZE, GROUP_PROMPT_TOKENS)
        prompts = [prompts[0]] * GROUP_SIZE if is_shared else prompts
        async with open_engine(
            model, running=GROUP_SIZE, context_tokens=LONG_CONTEXT_TOKENS
        ) as engine:
            took_s = await seconds(ask(engine, prompts, GROUP_NEW_TOKENS))
            figures.append((took_s, engine.stats().num_prefill_tokens))
        say(row_of("siblings: one prompt" if is_shared else "prompts of their own", figures[-1]))
    say(ratio_row(figures))


def row_of(name: str, figures: tuple[float, int]) -> str:
    return f"| {name} | {figures[0]:.2f} | {figures[1]:,} |"


def ratio_row(figures: list[tuple[float, int]]) -> str:
    (with_s, with_tokens), (without_s, without_tokens) = figures
    return f"| ratio | {without_s / with_s:.2f} | {without_tokens / with_tokens:.2f} |"


def random_prompts(model: Any, num: int, num_tokens: int) -> Prompts:
    made: Prompts = torch.randint(0, model.config.vocab_size, (num, num_tokens)).tolist()
    return made


async def ask(front: Any, prompts: Prompts, num_new_tokens: int) -> Prompts:
    requests = []
    for prompt in prompts:
        number = next(_numbers)
        requests.append(
            GenerateRequest(
                request_id=f"r{number}",
                execution=f"e{number}",
                prompt_ids=prompt,
                max_new_tokens=num_new_tokens,
                seed=number,
            )
        )
    made = await asyncio.gather(*(collect(front.submit(one)) for one in requests))
    assert all(len(one.ids) == num_new_tokens for one in made)
    return [one.ids for one in made]


async def seconds(work: Awaitable[object]) -> float:
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


@torch.inference_mode()
def generate(model: Any, prompts: Prompts) -> None:
    ids = torch.tensor(prompts)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=_generation(),
    )


@contextmanager
def open_continuous(model: Any, *, running: int) -> Iterator[Callable[[Prompts], None]]:
    """A function that has transformers' manager answer prompts. It switches the module's attention,
    so it gets a copy."""
    pages = -(-(PROMPT_TOKENS + NEW_TOKENS) // PAGE_TOKENS)
    settings = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=running * pages + 1, max_batch_tokens=STEP_TOKENS
    )
    module = copy.deepcopy(model)
    manager = module.init_continuous_batching(
        generation_config=_generation(eos_token_id=-1), continuous_batching_config=settings
    )
    manager.start()

    def answer(prompts: Prompts) -> None:
        manager.add_requests(inputs=prompts, max_new_tokens=NEW_TOKENS)
        num_left = len(prompts)
        while num_left:
            one = manager.get_result(timeout=ANSWER_S)
            if one is None:
                raise SystemExit("the continuous batching of transformers makes no progress")
            num_left -= one.is_finished()

    try:
        yield answer
    finally:
        manager.stop(block=True, timeout=10)
        manager.destroy()


def _generation(**settings: Any) -> GenerationConfig:
    """Plain sampling of all words; nothing ends it early, nor does the model's own (`main`)."""
    return GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        **settings,
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
