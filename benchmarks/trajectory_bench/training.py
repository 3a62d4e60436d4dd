"""Forward and backward of micro-steps by the real cell: processor seconds of one torch thread.

Must not know what the micro-steps hold. Run times include the cell's own work on a micro-step.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.cells import MicroStep
from opengyre.trainer.embedded import EmbeddedCell, whole_cell
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.packed_model import ATTENTION, register_attention
from opengyre.trainer.stage import StageSettings
from opengyre.transport.weights_shm import SharedMemoryPlane


def small_model(vocabulary: int) -> nn.Module:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


@contextmanager
def training_cell(model: nn.Module) -> Iterator[EmbeddedCell]:
    torch.set_num_threads(1)
    settings = StageSettings(
        loss=StreamedLoss(), optimizer=AdamWSettings(learning_rate=1e-6), temperature=1.0
    )
    with tempfile.TemporaryDirectory() as folder:
        planes = [SharedMemoryPlane(Path(folder), slot=slot) for slot in "wg"]
        cell = whole_cell(model, weights=planes[0], gradients=planes[1], settings=settings)
        cell.enter_training()
        yield cell
        cell.leave_training()
        for plane in planes:
            plane.close()


def run_s(cell: EmbeddedCell, micro_steps: Sequence[MicroStep]) -> float:
    cell.open_step(0, 0, None)
    begun_s = time.process_time()
    for one in micro_steps:
        cell.run(one)
    return time.process_time() - begun_s


@contextmanager
def no_attention() -> Iterator[None]:
    """In its place the sum of a token's own query, key and value, so that all else stays."""
    AttentionInterface.register(ATTENTION, _own_only)
    yield
    register_attention()


def _own_only(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    own = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query + own).transpose(1, 2), None
