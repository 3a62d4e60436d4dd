"""What a cell will hold in memory in each role, from a run's config and its model's folder.

Must not know torch, or how memory is measured. Invariant: a prediction is of embedded parts; others
take next to nothing.
"""

from pathlib import Path

from opengyre.config.root import RunConfig
from opengyre.seams.memory import MemoryHeld
from opengyre.store.observations import Role
from opengyre.trainer.memory import MemoryPlan, in_rollout, in_training
from opengyre.trainer.model_sizes import ModelSizes, read_sizes

NUMBER_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def num_kv_slots(config: RunConfig) -> int:
    """Each has room for a whole context; there is one at least for every request that may run."""
    engine = config.engine
    if engine.kv_tokens is None:
        return engine.max_batch
    return engine.kv_tokens // config.sampling.context_tokens


def memory_plan(config: RunConfig, *, is_core: bool) -> MemoryPlan:
    return MemoryPlan(
        number_bytes=NUMBER_BYTES[config.model.dtype],
        num_kv_tokens=num_kv_slots(config) * config.sampling.context_tokens,
        num_micro_step_tokens=config.training.micro_step_tokens,
        is_core=is_core,
        keeps_reference=config.training.kl_coefficient > 0,
        exposes_sums=config.training.reduce == "star" and not is_core,
    )


def model_sizes(config: RunConfig) -> ModelSizes:
    """Raises ConfigError."""
    return read_sizes(Path(config.model.path), num_stages=config.topology.stages_per_cell)


def predicted(config: RunConfig, *, is_core: bool) -> dict[Role, MemoryHeld]:
    """The most that a cell holds in each role, {} for one that is not embedded. Raises ConfigError
    for a model without sizes."""
    if config.topology.engine != "embedded":
        return {}
    sizes, plan = model_sizes(config), memory_plan(config, is_core=is_core)
    return {Role.ROLLOUT: in_rollout(sizes, plan), Role.TRAINING: in_training(sizes, plan)}
