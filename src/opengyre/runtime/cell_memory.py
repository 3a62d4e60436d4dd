"""What a cell holds in memory before and after a change of its role.

Owns: the readings around one change. Must not know: how a role changes, torch. Invariant: the two
readings of a report enclose one change.
"""

from msgspec.structs import replace

from opengyre.runtime.parts import CellParts
from opengyre.seams.cells import CellBackend
from opengyre.seams.memory import MemoryHeld, MemoryReport
from opengyre.store.observations import Role


class CellMemory:
    """Of one cell's process and its stages. `begin` and `end` enclose a change of role."""

    def __init__(self, parts: CellParts) -> None:
        self._parts = parts
        self._before: MemoryHeld | None = None

    @property
    def is_changing(self) -> bool:
        return self._before is not None

    async def begin(self, backend: CellBackend) -> None:
        self._before = await self._held(backend)

    async def end(self, backend: CellBackend, role: Role) -> MemoryReport:
        before, self._before = self._before, None
        after = await self._held(backend)
        return MemoryReport(
            before=before or after,
            after=after,
            predicted=self._parts.predicted.get(role, MemoryHeld()),
        )

    async def _held(self, backend: CellBackend) -> MemoryHeld:
        held = await self._parts.compute.run(backend.held)
        stats = self._parts.engine.stats()
        return replace(
            held, kv_pool_bytes=stats.kv_capacity_bytes, kv_used_bytes=stats.kv_used_bytes
        )
