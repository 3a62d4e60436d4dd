"""The embedded torch parts of a cell: one module, its rollout engine and its training side.

Imported only where topology.engine = "embedded"; importing it imports torch. Called in the
compute thread. Invariants: the engine and the first pipeline stage share the module; the other
stages hold their own part of the model only.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from opengyre.config.root import RunConfig
from opengyre.config.schedule import TopologyConfig
from opengyre.control.ids import standalone_engine_id
from opengyre.engines.compute import ComputeThread
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.engines.torch_engine.model import load_model
from opengyre.runtime.memory_plan import num_kv_slots
from opengyre.runtime.messages import CellSetup
from opengyre.runtime.objective import loss_of
from opengyre.runtime.planes import Planes, open_planes
from opengyre.runtime.stages import StageProcesses, StageSetup
from opengyre.seams.cells import CellBackend
from opengyre.seams.engine import Engine
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.trainer import orders as o
from opengyre.trainer.cut import cut_of, load_cut
from opengyre.trainer.desk import Place, StageDesk
from opengyre.trainer.embedded import EmbeddedCell
from opengyre.trainer.followers import ANSWER_S, RemoteStage
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.pipeline.follower import Follower
from opengyre.trainer.pipeline.link import Link, open_link
from opengyre.trainer.prefix_groups import GroupStore, PrefixGroups
from opengyre.trainer.stage import StageSettings
from opengyre.trainer.stage_model import StageModel
from opengyre.trainer.whole_model import WholeModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
TIED = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSide:
    """`store` is where this cell's pipeline stages meet, and the members of its prefix if it is the
    core."""

    backend: CellBackend
    store: GroupStore
    groups: PrefixGroups

    def close(self) -> None:
        self.groups.close()
        self.store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a stage after the first is made of."""

    desk: StageDesk
    follower: Follower


def use_threads(num_threads: int = 1) -> None:
    """Of the calling thread's passes. Two teams of threads on shared cores run many times slower
    than one thread each."""
    torch.set_num_threads(num_threads)


def build_engine(config: RunConfig, setup: CellSetup, compute: ComputeThread) -> tuple[Engine, Any]:
    """The engine and its module. Raises ConfigError for a model that cannot run."""
    use_threads(config.engine.threads)
    torch.manual_seed(config.run.seed)
    model = load_model(
        Path(config.model.path),
        dtype=DTYPES[config.model.dtype],
        device=str(_device(config, setup, stage=0)),
    )
    context_tokens = config.sampling.context_tokens
    engine = TorchEngine(
        model,
        TorchEngineConfig(
            max_running=config.engine.max_batch,
            num_kv_slots=num_kv_slots(config),
            context_tokens=context_tokens,
            step_tokens=config.engine.max_batch + config.engine.prefill_tokens,
            name=setup.life,
            kv_handoff=config.engine.kv_handoff,
            kv_lease_s=config.engine.kv_lease_s,
            kv_handoff_idle=config.engine.kv_handoff_idle,
            kv_plane=config.topology.weight_plane,
        ),
        compute,
    )
    return engine, model


def build_training(
    config: RunConfig, setup: CellSetup, module: Any, planes: Planes, others: StageProcesses
) -> TrainingSide:
    """Raises ConfigError for a model that cannot be cut so, BoundaryError if a stage is lost."""
    num_stages = config.topology.stages_per_cell
    settings, store = _settings(config), GroupStore()
    for stage, channel in enumerate(others.channels, start=1):
        message = StageSetup(cell=setup, stage=stage, num_stages=num_stages, store=store.address)
        channel.send(message, timeout_s=ANSWER_S)
    place = Place(num_stages=num_stages, tied=_tied(module.config, num_stages))
    desk = StageDesk(
        _first_part(module, num_stages, settings.temperature),
        settings=settings,
        place=place,
        weights=planes.weights,
        gradients=planes.gradients,
    )
    device = _device(config, setup, stage=0)
    link = _link(setup, place, store.address, device) if others.channels else None
    for channel in others.channels:
        _take_ready(channel.receive(timeout_s=ANSWER_S))
    backend = EmbeddedCell(
        desk,
        settings=settings,
        followers=[RemoteStage(channel) for channel in others.channels],
        link=link,
        is_core=setup.cell == 0,
    )
    return TrainingSide(backend=backend, store=store, groups=desk.groups)


@contextlib.contextmanager
def open_stage(config: RunConfig, message: StageSetup) -> Iterator[StageParts]:
    """A stage after the first. Raises ConfigError."""
    use_threads(config.engine.threads)
    settings, setup = _settings(config), message.cell
    num_stages = message.num_stages
    device = _device(config, setup, stage=message.stage)
    model = load_cut(
        Path(config.model.path),
        stage=message.stage,
        num_stages=num_stages,
        dtype=DTYPES[config.model.dtype],
        device=device,
        temperature=settings.temperature,
    )
    tied = _tied(AutoConfig.from_pretrained(config.model.path), num_stages)
    place = Place(stage=message.stage, num_stages=num_stages, tied=tied)
    with open_planes(setup, stage=place.stage, kind=config.topology.weight_plane) as planes:
        desk = StageDesk(
            model,
            settings=settings,
            place=place,
            weights=planes.weights,
            gradients=planes.gradients,
        )
        desk.stage.leave(keeps_weights=setup.cell == 0)
        link = _link(setup, place, message.store, device)
        follower = Follower(desk.stage, link=link, stage=place.stage, num_stages=num_stages)
        yield StageParts(desk=desk, follower=follower)
        desk.groups.close()


def _first_part(module: Any, num_stages: int, temperature: float) -> StageModel:
    if num_stages == 1:
        return WholeModel(module, temperature=temperature)
    return cut_of(module, stage=0, num_stages=num_stages, temperature=temperature)


def _tied(model_config: Any, num_stages: int) -> str:
    return TIED if model_config.tie_word_embeddings and num_stages > 1 else ""


def _link(setup: CellSetup, place: Place, store: str, device: torch.device) -> Link:
    return open_link(
        store,
        name=f"{setup.engine}-{setup.incarnation}",
        stage=place.stage,
        num_stages=place.num_stages,
        device=str(device),
    )


def _take_ready(answer: object) -> None:
    if isinstance(answer, o.Refused):
        if answer.boundary == "config":
            raise ConfigError(answer.reason)
        raise BoundaryError(answer.boundary, answer.reason, retryable=answer.retryable)


def device_number(setup: CellSetup, topology: TopologyConfig, *, stage: int, num: int) -> int:
    """Of `num` devices: each process of a run has the next one, cells stage by stage, then
    standalone engines."""
    if setup.cell is not None:
        return (setup.cell * topology.stages_per_cell + stage) % num
    alone: list[str] = [standalone_engine_id(k) for k in range(topology.num_standalone)]
    return (topology.num_cells * topology.stages_per_cell + alone.index(setup.engine)) % num


def _device(config: RunConfig, setup: CellSetup, *, stage: int) -> torch.device:
    """Of this process and `stage`; on CUDA not run."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num = torch.cuda.device_count()
    return torch.device("cuda", device_number(setup, config.topology, stage=stage, num=num))


def _settings(config: RunConfig) -> StageSettings:
    chosen = config.training
    return StageSettings(
        loss=loss_of(config),
        optimizer=AdamWSettings(
            learning_rate=chosen.learning_rate,
            betas=chosen.betas,
            weight_decay=chosen.weight_decay,
            warmup_updates=chosen.warmup_updates,
            max_grad_norm=chosen.max_grad_norm,
        ),
        temperature=config.sampling.temperature,
    )
