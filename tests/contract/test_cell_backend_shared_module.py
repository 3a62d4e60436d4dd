"""One module, two roles: what the engine samples is what the trainer recomputes, before and
after an update, and the engine samples on with the new weights."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.engines.compute import ComputeThread
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.seams.cells import MicroStep, Segment, TrainedPath
from opengyre.seams.engine import GenerateRequest
from opengyre.trainer.embedded import EmbeddedCell, whole_cell
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.objectives.signature import ObjectiveSettings
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.stage import StageSettings
from opengyre.transport.weights_shm import SharedMemoryPlane

VOCABULARY = 48
NUM_PROMPT_TOKENS = 6
NUM_NEW_TOKENS = 20


def _model() -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=24,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


async def _sample(engine: TorchEngine, number: int, temperature: float) -> MicroStep:
    """One sampled sequence as a micro-step of its own."""
    prompt = np.random.default_rng(number).integers(0, VOCABULARY, NUM_PROMPT_TOKENS).tolist()
    ids: list[int] = []
    logprobs: list[float] = []
    request = GenerateRequest(
        request_id=f"r{number}",
        execution=f"e{number}",
        prompt_ids=prompt,
        max_new_tokens=NUM_NEW_TOKENS,
        temperature=temperature,
        seed=number,
    )
    async for chunk in engine.submit(request):
        ids += chunk.ids
        logprobs += chunk.logprobs
    num_tokens = len(prompt) + len(ids)
    path = TrainedPath(
        execution=f"e{number}",
        group="g0",
        turn=f"t{number}",
        pieces=[(0, num_tokens)],
        trained=[(len(prompt), num_tokens)],
        advantage=1.0 if number % 2 else -1.0,
        num_path_tokens=len(ids),
        num_execution_tokens=len(ids),
    )
    return MicroStep(
        step=0,
        number=number,
        version=0,
        token_ids=prompt + ids,
        position_ids=list(range(num_tokens)),
        logprobs=[0.0] * len(prompt) + logprobs,
        segments=[Segment(start=0, end=num_tokens)],
        paths=[path],
    )


async def _alternate(cell: EmbeddedCell, engine: TorchEngine, temperature: float) -> list[int]:
    """Sample and train twice; returns the tokens that left a ratio interval of 1e-4."""
    num_clipped = []
    for step in range(2):
        made = [await _sample(engine, 4 * step + place, temperature) for place in range(4)]
        await engine.pause()
        await engine.release()
        cell.enter_training()
        cell.open_step(0, 0, None)
        num_clipped.append(sum(cell.run(one).num_clipped for one in made))
        cell.reduce([])
        assert cell.update(1).is_applied
        cell.leave_training()
        await engine.restore()
        await _load(engine, cell, version=step + 1)
    return num_clipped


async def _load(engine: TorchEngine, cell: EmbeddedCell, *, version: int) -> None:
    await engine.begin_update(version)
    for name, array in cell.parameters().items():
        await engine.push(name, array)
    await engine.commit(version)
    await engine.resume()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_trainer_agree_on_one_module_through_role_changes(
    tmp_path: Path, temperature: float
) -> None:
    module, compute = _model(), ComputeThread()
    planes = [SharedMemoryPlane(tmp_path, slot=slot) for slot in "wg"]
    tight = StreamedLoss(settings=ObjectiveSettings(clip_low=1 - 1e-4, clip_high=1 + 1e-4))
    settings = StageSettings(
        loss=tight, optimizer=AdamWSettings(learning_rate=1e-2), temperature=temperature
    )
    cell = whole_cell(module, weights=planes[0], gradients=planes[1], settings=settings)
    config = TorchEngineConfig(max_running=2, num_kv_slots=2, context_tokens=64, step_tokens=64)
    try:
        engine = TorchEngine(module, config, compute)
        run = asyncio.wait_for(_alternate(cell, engine, temperature), 60)
        assert asyncio.run(run) == [0, 0]
    finally:
        compute.close()
