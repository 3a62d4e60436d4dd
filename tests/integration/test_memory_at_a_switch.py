"""A whole embedded cell goes to and fro between its roles: what it holds is what was predicted.

The cell's own handler, engine, training side and stage processes; only the controller is left out.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.config.load import load_config, resolved_json
from opengyre.runtime import messages as m
from opengyre.runtime.cell_process import CellProcess
from opengyre.runtime.child import Child
from opengyre.runtime.parts import CellParts, build_parts
from opengyre.seams.cells import MicroStep, Segment, TrainedPath
from opengyre.seams.engine import GenerateRequest
from opengyre.seams.memory import MemoryReport
from opengyre.seams.weights import Snapshot
from opengyre.transport.weights_shm import SharedMemoryPlane

MIB = 2**20
VOCABULARY = 256
CONTEXT_TOKENS = 512
NUM_KV_TOKENS = 8 * CONTEXT_TOKENS
NUM_REQUESTS = 6
NUM_PROMPT_TOKENS = 480
NUM_STEP_TOKENS = 512
SLACK_BYTES = 24 * MIB
"""What the allocator keeps of what was given back: a quarter of the KV or of the activations."""
UNEQUAL = {"resident_bytes": 0, "activations_bytes": 0, "exposed_bytes": 0}
PROGRAM_BYTES = 600 * MIB
"""One process with its libraries."""

CONFIG = """
[run]
dir = "runs"
num_steps = 6
[model]
path = "model"
[[tasks]]
path = "tasks"
[topology]
num_cells = 2
engine = "embedded"
[sampling]
context_tokens = 512
max_new_tokens = 16
[engine]
max_batch = 8
[training]
micro_step_tokens = 512
learning_rate = 1e-4
reduce = "star"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With 32 KiB of KV for each token, and weights of 4.4 MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("memory")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        intermediate_size=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path / "model")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(path / "model" / "tokenizer.json"))
    (path / "run.toml").write_text(CONFIG)
    (path / "tasks").mkdir()
    return path


@dataclass(kw_only=True)
class Driven:
    """One cell as its controller sees it. `reports` are of its changes of role, in order."""

    parts: CellParts
    ask: Callable[[m.Message], Any]
    is_core: bool
    plane: SharedMemoryPlane
    model: Path
    version: int = 0
    reports: list[MemoryReport] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    async def serve(self) -> None:
        """As an engine: fill most of the KV memory, and read how much."""
        await asyncio.gather(*(self._generate(number) for number in range(NUM_REQUESTS)))

    async def become_trainer(self) -> None:
        """Nothing runs or waits any more."""
        self.reports.append((await self.ask(m.BeTrainer())).memory)

    async def train(self) -> None:
        """Two micro-steps of a step; the core updates by it and exposes what came out."""
        snapshot = None if self.is_core else await self._weights()
        join = m.JoinStep(step=self.version, version=self.version, snapshot=snapshot)
        assert (await self.ask(join)).version == self.version
        backend, run = self.parts.backend, self.parts.compute.run
        assert backend is not None
        for number in range(2):
            await run(backend.run, _micro_step(number, step=self.version, version=self.version))
        await self.ask(m.Settle(step=self.version))
        if self.is_core:
            await self.ask(m.ReduceStep(step=self.version, members=[]))
            updated = await self.ask(m.UpdateStep(step=self.version, version=self.version + 1))
            assert updated.norms.is_applied
        else:
            await self.ask(m.ShareGradients(step=self.version))
            await self.ask(m.DropStep(step=self.version))
        self.version += 1

    async def become_engine(self) -> None:
        snapshot = await self._weights()
        loaded = await self.ask(m.BeEngine(version=self.version, snapshot=snapshot))
        assert loaded.version == self.version
        self.reports.append(loaded.memory)

    async def _weights(self) -> Snapshot:
        """The core's own; a satellite's come from elsewhere."""
        if self.is_core:
            pinned = [self.version - 1]
            expose = m.ExposeWeights(version=self.version, pinned=pinned)
            exposed: Snapshot = (await self.ask(expose)).snapshot
            return exposed
        part = self.plane.expose(load_file(self.model), self.version)
        return Snapshot(version=self.version, parts=[part])

    async def _generate(self, number: int) -> None:
        draw = np.random.default_rng([self.version, number])
        request = GenerateRequest(
            request_id=f"r{next(self.numbers)}",
            execution=f"e{self.version}-{number}",
            prompt_ids=draw.integers(0, VOCABULARY, NUM_PROMPT_TOKENS).tolist(),
            max_new_tokens=4,
            seed=number,
        )
        async for chunk in self.parts.engine.submit(request):
            assert not chunk.reason


def _micro_step(number: int, *, step: int, version: int) -> MicroStep:
    """Two lines of their own, all but the first token of each trained."""
    draw, half = np.random.default_rng([step, number]), NUM_STEP_TOKENS // 2
    bounds = [(0, half), (half, NUM_STEP_TOKENS)]
    return MicroStep(
        step=step,
        number=number,
        version=version,
        token_ids=draw.integers(0, VOCABULARY, NUM_STEP_TOKENS).tolist(),
        position_ids=[place for start, end in bounds for place in range(end - start)],
        logprobs=[-5.0] * NUM_STEP_TOKENS,
        segments=[Segment(start=start, end=end) for start, end in bounds],
        paths=[
            TrainedPath(
                execution=f"e{number}-{start}",
                group="g0",
                turn=f"t{number}-{start}",
                pieces=[(start, end)],
                trained=[(start + 1, end)],
                advantage=1.0 if start else -1.0,
                num_path_tokens=end - start - 1,
                num_execution_tokens=end - start - 1,
            )
            for start, end in bounds
        ],
    )


@asynccontextmanager
async def _cell(folder: Path, work: Path, *, cell: int, num_stages: int) -> AsyncIterator[Driven]:
    overrides = [f"engine.kv_tokens={NUM_KV_TOKENS}", f"topology.stages_per_cell={num_stages}"]
    planes = work / "planes"
    planes.mkdir()
    setup = m.CellSetup(
        engine=f"c{cell}",
        cell=cell,
        incarnation=1,
        slots=8,
        config_json=resolved_json(load_config(folder / "run.toml", overrides)),
        link_address=f"unix:{work / 'link.sock'}",
        plane_dir=str(planes),
    )
    plane = SharedMemoryPlane(planes, slot="elsewhere")
    async with asyncio.TaskGroup() as tasks, build_parts(setup) as parts:
        process = CellProcess(Child(f"c{cell}", 1), setup, parts, tasks)
        driven = Driven(
            parts=parts,
            ask=process.handle,
            is_core=cell == 0,
            plane=plane,
            model=folder / "model" / "model.safetensors",
        )
        loaded = await driven.ask(m.LoadVersion(version=0, snapshot=await driven._weights()))
        assert loaded.memory is None, "a publication changes no role"
        yield driven
        plane.close()


async def _two_cycles(driven: Driven) -> None:
    """Rollout, training, rollout, training, rollout."""
    for _ in range(2):
        await driven.serve()
        await driven.become_trainer()
        await driven.train()
        await driven.become_engine()


Reports = list[MemoryReport]


def _reports(folder: Path, work: Path, *, cell: int, num_stages: int = 1) -> Reports:
    async def main() -> Reports:
        async with _cell(folder, work, cell=cell, num_stages=num_stages) as driven:
            await _two_cycles(driven)
            return driven.reports

    return asyncio.run(main())


@pytest.fixture(
    scope="module",
    params=[(0, 1), (0, 2), (1, 1)],
    ids=["core", "core of two stages", "satellite"],
)
def cell(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Its number, and how many stages it has."""
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(scope="module")
def reports(
    cell: tuple[int, int], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    """Of a process of its own: what tests before these left in this one would count."""
    number, num_stages = cell
    work = tmp_path_factory.mktemp("cell")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_reports, folder, work, cell=number, num_stages=num_stages).result()


def test_a_trainer_holds_no_kv_and_an_engine_holds_no_sums(reports: Reports) -> None:
    for to_training in reports[::2]:
        assert to_training.before.kv_used_bytes > 80 * MIB
        assert to_training.before.gradients_bytes == 0
        assert to_training.after.kv_pool_bytes == to_training.after.kv_used_bytes == 0
        assert to_training.after.gradients_bytes > 4 * MIB
    for to_rollout in reports[1::2]:
        assert to_rollout.before.kv_pool_bytes == 0
        assert to_rollout.before.gradients_bytes > 4 * MIB
        assert to_rollout.after.gradients_bytes == to_rollout.after.kv_used_bytes == 0
        assert to_rollout.after.kv_pool_bytes == to_rollout.predicted.kv_pool_bytes


def test_only_the_core_holds_moments_and_it_keeps_them(
    reports: Reports, cell: tuple[int, int]
) -> None:
    held = [one for report in reports for one in (report.before, report.after)]
    moments = [one.optimizer_bytes for one in held]
    if cell[0] == 0:
        assert moments == [0, 0, *[reports[0].predicted.optimizer_bytes] * 6]
        assert moments[-1] > 8 * MIB
    else:
        assert moments == [0] * 8


def test_what_is_held_is_what_was_predicted(reports: Reports) -> None:
    """In each role at its end, once there was an update, and two versions were exposed."""
    for ending, began in (
        (reports[1], reports[0]),
        (reports[2], reports[1]),
        (reports[3], reports[2]),
    ):
        held, predicted = ending.before, began.predicted
        for name in ("weights_bytes", "kv_pool_bytes", "gradients_bytes", "optimizer_bytes"):
            assert getattr(held, name) == getattr(predicted, name), name
    held, predicted = reports[3].after, reports[3].predicted
    assert 0 <= held.exposed_bytes - predicted.exposed_bytes < MIB / 2, "headers and gaps"
    for report in reports:
        assert report.after.weights_bytes == report.predicted.weights_bytes
        for held in (report.before, report.after):
            assert held.exposed_bytes < report.predicted.exposed_bytes + MIB / 2


def test_activations_stay_below_what_was_predicted_and_above_half_of_it(reports: Reports) -> None:
    for began, ended in (reports[:2], reports[2:]):
        predicted_bytes = began.predicted.activations_bytes
        assert 0.5 * predicted_bytes < ended.before.activations_bytes < 1.15 * predicted_bytes
        assert began.before.activations_bytes == ended.after.activations_bytes == 0


def test_memory_is_with_the_system_again_after_each_switch(
    reports: Reports, cell: tuple[int, int]
) -> None:
    for report in reports[::2]:
        freed_bytes = report.before.resident_bytes - report.after.resident_bytes
        assert freed_bytes > report.before.kv_used_bytes - SLACK_BYTES / 2
    for report in reports:
        most_bytes = report.predicted.resident_bytes + cell[1] * PROGRAM_BYTES
        assert report.after.resident_bytes < most_bytes


def test_the_second_cycle_ends_with_no_more_than_the_first(
    reports: Reports, cell: tuple[int, int]
) -> None:
    """As trainer and as engine; the first one brought the code of training into memory. What each
    process's allocator keeps varies: by less than half of the activations while it trains, by less
    than a quarter of the KV that was used once it serves."""
    first, second = reports[1], reports[3]
    for was, now, slack_bytes in (
        (first.before, second.before, first.before.activations_bytes / 2),
        (first.after, second.after, cell[1] * SLACK_BYTES),
    ):
        assert now.resident_bytes < was.resident_bytes + slack_bytes
        assert msgspec.structs.replace(now, **UNEQUAL) == msgspec.structs.replace(was, **UNEQUAL)
