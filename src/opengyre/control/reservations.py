"""Where the executions of a leaving cell go (2.2.2).

Owns: the choice of destinations. Must not know: commands, routes.
Invariant: destinations are engines that serve, each within its free slots.
"""

from collections.abc import Sequence

from opengyre.control.cells import Engine
from opengyre.control.ids import EngineId, ExecutionId


def reserve(
    executions: Sequence[ExecutionId], engines: Sequence[Engine]
) -> tuple[tuple[ExecutionId, EngineId], ...] | None:
    """Standalone engines first (most free, then first), then cells from the last to the core.

    None if they do not all fit.
    """
    free = {engine.engine: engine.num_free for engine in engines}
    standalone = [engine for engine in engines if engine.cell is None]
    cells = sorted(
        (engine for engine in engines if engine.cell is not None),
        key=lambda engine: engine.stay,
    )
    moves: list[tuple[ExecutionId, EngineId]] = []
    for execution in executions:
        engine = max(standalone, key=lambda one: (free[one.engine], -one.stay), default=None)
        if engine is None or free[engine.engine] <= 0:
            engine = next((one for one in cells if free[one.engine] > 0), None)
        if engine is None:
            return None
        free[engine.engine] -= 1
        moves.append((execution, engine.engine))
    return tuple(moves)
