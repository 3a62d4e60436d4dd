"""What the memory of a cell will be in each role, and what it was before and after a change.

Owns: from config and model folder to a prediction, the readings around one change of role. Must not
know: how a role changes, torch. Invariant: a prediction is of the embedded parts; others take next
to nothing, and so does their account.
"""

from pathlib import Path

from msgspec.structs import replace

from opengyre.config.load import parse_resolved
from opengyre.config.root import RunConfig
from opengyre.runtime.messages import CellSetup
from opengyre.runtime.parts import CellParts
from opengyre.seams.cells import CellBackend
from opengyre.seams.memory import MemoryHeld, MemoryReport
from opengyre.store.observations import Role
from opengyre.trainer.memory import MemoryPlan, in_rollout, in_training
from opengyre.trainer.model_sizes import ModelSizes, read_sizes

NUMBER_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def memory_plan(config: RunConfig, *, is_core: bool) -> MemoryPlan:
    engine, context_tokens = config.engine, config.sampling.context_tokens
    num_slots = max(engine.max_batch, engine.kv_tokens // context_tokens)
    return MemoryPlan(
        number_bytes=NUMBER_BYTES[config.model.dtype],
        num_kv_tokens=num_slots * context_tokens,
        num_micro_step_tokens=config.training.micro_step_tokens,
        is_core=is_core,
        keeps_reference=config.training.kl_coefficient > 0,
        exposes_sums=config.training.reduce == "star" and not is_core,
    )


def model_sizes(config: RunConfig) -> ModelSizes:
    """Raises ConfigError."""
    return read_sizes(Path(config.model.path), num_stages=config.topology.stages_per_cell)


def predicted(config: RunConfig, *, is_core: bool) -> dict[Role, MemoryHeld]:
    """The most that a cell holds in each role. Raises ConfigError for a model without sizes."""
    if config.topology.engine != "embedded":
        return {Role.ROLLOUT: MemoryHeld(), Role.TRAINING: MemoryHeld()}
    sizes, plan = model_sizes(config), memory_plan(config, is_core=is_core)
    return {Role.ROLLOUT: in_rollout(sizes, plan), Role.TRAINING: in_training(sizes, plan)}


class CellMemory:
    """Of one cell's process and its stages. `begin` and `end` enclose a change of role."""

    def __init__(self, setup: CellSetup, parts: CellParts) -> None:
        self._parts = parts
        self._predicted = predicted(parse_resolved(setup.config_json), is_core=setup.cell == 0)
        self._before: MemoryHeld | None = None

    @property
    def is_changing(self) -> bool:
        return self._before is not None

    async def begin(self, backend: CellBackend) -> None:
        self._before = await self._held(backend)

    async def end(self, backend: CellBackend, role: Role) -> MemoryReport:
        before, self._before = self._before, None
        after = await self._held(backend)
        return MemoryReport(before=before or after, after=after, predicted=self._predicted[role])

    async def _held(self, backend: CellBackend) -> MemoryHeld:
        held = await self._parts.compute.run(backend.held)
        stats = self._parts.engine.stats()
        return replace(
            held, kv_pool_bytes=stats.kv_capacity_bytes, kv_used_bytes=stats.kv_used_bytes
        )
