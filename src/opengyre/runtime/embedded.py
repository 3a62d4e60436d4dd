"""The embedded torch parts of a cell: one module, its rollout engine and its training side.

Imported only where topology.engine = "embedded"; importing it imports torch. Called in the
compute thread. Invariant: engine and training side share the module.
"""

import logging
from pathlib import Path

import torch

from opengyre.config.root import RunConfig
from opengyre.engines.compute import ComputeThread
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.engines.torch_engine.model import load_model
from opengyre.runtime.messages import CellSetup
from opengyre.runtime.planes import Planes
from opengyre.seams.cells import CellBackend
from opengyre.seams.engine import Engine

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def use_one_thread() -> None:
    """Two teams of threads on shared cores run many times slower than one thread each."""
    torch.set_num_threads(1)


def build_embedded(
    config: RunConfig, setup: CellSetup, planes: Planes, compute: ComputeThread
) -> tuple[Engine, CellBackend | None]:
    """Raises ConfigError for a model that cannot run."""
    use_one_thread()
    torch.manual_seed(config.run.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(Path(config.model.path), dtype=DTYPES[config.model.dtype], device=device)
    context_tokens = config.sampling.context_tokens
    engine = TorchEngine(
        model,
        TorchEngineConfig(
            max_running=config.engine.max_batch,
            num_kv_slots=max(config.engine.max_batch, config.engine.kv_tokens // context_tokens),
            context_tokens=context_tokens,
            step_tokens=config.engine.max_batch + config.engine.prefill_tokens,
        ),
        compute,
    )
    if setup.cell is None:
        return engine, None
    return engine, _training_side(config, planes, model)


def _training_side(config: RunConfig, planes: Planes, model: torch.nn.Module) -> CellBackend:
    from opengyre.runtime.objective import loss_of
    from opengyre.trainer.embedded import EmbeddedCell, EmbeddedSettings
    from opengyre.trainer.optimizer import AdamWSettings

    chosen = config.training
    if chosen.kl_coefficient:
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        log.info("training.kl_coefficient keeps %.1f MiB of initial weights", num_bytes / 2**20)
    return EmbeddedCell(
        model,
        weights=planes.weights,
        gradients=planes.gradients,
        settings=EmbeddedSettings(
            loss=loss_of(config),
            optimizer=AdamWSettings(
                learning_rate=chosen.learning_rate,
                betas=chosen.betas,
                weight_decay=chosen.weight_decay,
                warmup_updates=chosen.warmup_updates,
                max_grad_norm=chosen.max_grad_norm,
            ),
            temperature=config.sampling.temperature,
        ),
    )
