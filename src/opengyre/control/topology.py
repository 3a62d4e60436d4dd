"""Engines and cells, and the indexes that let a rule look at few of them.

Owns: every change of an engine's state and slots and of a cell's role; C_R; who must be looked at.
Must not know: why anything changes, commands, groups.
Invariants: an index never differs from what a walk over all engines and cells would find; a
change costs the same with ten cells as with ten thousand (a logarithm for free slots).
"""

import heapq
from collections.abc import Iterable

from opengyre.control.cells import Cell, CellRole, Engine, EngineState
from opengyre.control.config import SchedulerConfig
from opengyre.control.errors import InvariantError
from opengyre.control.executions import Execution
from opengyre.control.ids import EngineId, ExecutionId

CORE = 0
OUT_OF_SERVICE = (EngineState.ABSENT, EngineState.QUARANTINED)


class Topology:
    """`unsettled` engines may have a version to load or a door to open; `unjoined` cells train
    but no open step was told of them; `to_enter` cells wait in rollout on their way back to
    training; `suspects` are to be fenced."""

    def __init__(self, config: SchedulerConfig, *, num_fixed: int) -> None:
        by_cell = {spec.cell: spec.engine for spec in config.engines if spec.cell is not None}
        self.cells = [
            Cell(cell=number, engine=by_cell[number], is_fixed=number < num_fixed)
            for number in range(config.num_cells)
        ]
        self.engines: dict[EngineId, Engine] = {}
        for index, spec in enumerate(config.engines):
            stay = index if spec.cell is None else len(config.engines) + config.num_cells
            self.engines[spec.engine] = Engine(
                engine=spec.engine,
                slots=spec.slots,
                cell=spec.cell,
                number=index,
                stay=stay - (spec.cell or 0),
            )
        self.engines_by_state: dict[EngineState, dict[EngineId, Engine]] = {
            state: {} for state in EngineState
        }
        self.engines_by_state[EngineState.ABSENT].update(self.engines)
        self.cells_by_role: dict[CellRole, dict[int, Cell]] = {role: {} for role in CellRole}
        self.cells_by_role[CellRole.ABSENT].update({cell.cell: cell for cell in self.cells})
        self.must_return: dict[int, Cell] = {}
        self.to_enter: dict[int, Cell] = {}
        self.unjoined: dict[int, Cell] = {}
        self.unsettled: dict[EngineId, Engine] = {}
        self.suspects: dict[EngineId, Engine] = {}
        self.capacity = 0
        self.num_free_open = 0
        self.cells_revision = 0
        self._cursor = 0
        self._free: list[tuple[int, int, EngineId]] = []

    @property
    def core(self) -> Cell:
        return self.cells[CORE]

    def engine_of(self, cell: Cell) -> Engine:
        return self.engines[cell.engine]

    @property
    def is_moving(self) -> bool:
        """Some cell returns, or must."""
        return bool(self.must_return or self.cells_by_role[CellRole.RETURNING])

    @property
    def next_in_order(self) -> Cell | None:
        """The first cell that is not in training to stay; dead satellites are passed over."""
        while self._cursor < len(self.cells) and _is_passed(self.cells[self._cursor]):
            self._cursor += 1
        return self.cells[self._cursor] if self._cursor < len(self.cells) else None

    def is_in_rollout(self, engine: Engine) -> bool:
        """Standalone, or in a cell that serves rollout and is not bound for training."""
        if engine.cell is None:
            return True
        cell = self.cells[engine.cell]
        return cell.role is CellRole.ROLLOUT and not cell.is_bound

    # ---- changes

    def move_engine(self, engine: Engine, state: EngineState) -> None:
        if engine.state is EngineState.OPEN:
            self.num_free_open -= engine.num_free
        del self.engines_by_state[engine.state][engine.engine]
        engine.move(state)
        self.engines_by_state[state][engine.engine] = engine
        if state is EngineState.OPEN:
            self.num_free_open += engine.num_free
            self._push_free(engine)
        self._look_at(engine)

    def move_cell(self, cell: Cell, role: CellRole) -> None:
        del self.cells_by_role[cell.role][cell.cell]
        cell.move(role)
        self.cells_by_role[role][cell.cell] = cell
        self._cell_changed(cell)

    def set_order(self, cell: Cell, *, in_order: bool) -> None:
        if cell.in_order != in_order:
            cell.in_order = in_order
            self._cell_changed(cell)

    def set_must_return(self, cell: Cell, *, is_asked: bool) -> None:
        cell.must_return = is_asked
        if is_asked:
            self.must_return[cell.cell] = cell
        else:
            self.must_return.pop(cell.cell, None)
        self._cell_changed(cell)

    def set_wanted(self, cell: Cell, *, is_wanted: bool) -> None:
        """A core that was in training when it died goes straight back."""
        if cell.is_wanted != is_wanted:
            cell.is_wanted = is_wanted
            self._cell_changed(cell)

    def suspect(self, engine: Engine, why: str) -> None:
        if engine.state is not EngineState.ABSENT:
            engine.suspicion = why
            self.suspects[engine.engine] = engine

    def clear_suspicion(self, engine: Engine) -> None:
        engine.suspicion = None
        self.suspects.pop(engine.engine, None)

    def unsettle_all(self) -> None:
        """A version was published: every engine may have to load it."""
        self.unsettled.update(self.engines)

    def gather_joiners(self) -> None:
        """A step opened: every satellite in training may join it."""
        self.unjoined = dict(self.cells_by_role[CellRole.TRAINING])
        self.unjoined.pop(CORE, None)

    # ---- slots

    def take_slot(self, execution: ExecutionId, engine: Engine) -> None:
        if engine.num_free <= 0:
            raise InvariantError(f"{engine.engine} has no free slot for {execution}")
        engine.live[execution] = None
        self._free_changed(engine, -1)

    def release_slot(self, execution: ExecutionId, engine: Engine) -> None:
        del engine.live[execution]
        self._free_changed(engine, 1)

    def best_for(self, execution: Execution) -> Engine:
        """Prefix affinity, then most free slots, then the engine that stays longest (rule 6)."""
        group = execution.group
        best = None if group is None else self._nearest(group.num_members_by_engine)
        best = best or self._most_free()
        if best is None:
            raise InvariantError(f"no open engine has a slot for {execution.execution}")
        return best

    def _nearest(self, num_members_by_engine: dict[EngineId, int]) -> Engine | None:
        best, best_key = None, (0, 0, 0)
        for name, num_members in num_members_by_engine.items():
            engine = self.engines[name]
            if num_members <= 0 or engine.state is not EngineState.OPEN or engine.num_free <= 0:
                continue
            key = (num_members, engine.num_free, -engine.stay)
            if best is None or key > best_key:
                best, best_key = engine, key
        return best

    def _most_free(self) -> Engine | None:
        while self._free:
            negative_free, _, name = self._free[0]
            engine = self.engines[name]
            if engine.state is EngineState.OPEN and 0 < engine.num_free == -negative_free:
                return engine
            heapq.heappop(self._free)
        return None

    def _free_changed(self, engine: Engine, change: int) -> None:
        if engine.state is EngineState.OPEN:
            self.num_free_open += change
            self._push_free(engine)

    def _push_free(self, engine: Engine) -> None:
        """Older entries of the same engine are stale and go when they surface, or all at once."""
        heapq.heappush(self._free, (-engine.num_free, engine.stay, engine.engine))
        if len(self._free) > 8 * len(self.engines) + 64:
            self._free = _entries(self.engines_by_state[EngineState.OPEN].values())

    # ---- what a change touches

    def _cell_changed(self, cell: Cell) -> None:
        self.cells_revision += 1
        self._cursor = min(self._cursor, cell.cell)
        self._look_at(self.engine_of(cell))
        is_free = cell.role is CellRole.TRAINING and not cell.must_return
        if is_free and cell.cell != CORE:
            self.unjoined[cell.cell] = cell
        else:
            self.unjoined.pop(cell.cell, None)
        if cell.role is CellRole.ROLLOUT and (cell.is_wanted or (cell.is_fixed and cell.in_order)):
            self.to_enter[cell.cell] = cell
        else:
            self.to_enter.pop(cell.cell, None)

    def _look_at(self, engine: Engine) -> None:
        self.unsettled[engine.engine] = engine
        is_serving = self._is_serving(engine)
        if is_serving != engine.is_serving:
            engine.is_serving = is_serving
            self.capacity += engine.slots if is_serving else -engine.slots

    def _is_serving(self, engine: Engine) -> bool:
        return engine.state not in OUT_OF_SERVICE and self.is_in_rollout(engine)


def _is_passed(cell: Cell) -> bool:
    if cell.role is CellRole.TRAINING:
        return not cell.must_return
    is_gone = cell.role is CellRole.ABSENT or not cell.in_order
    return is_gone and cell.cell != CORE


def _entries(engines: Iterable[Engine]) -> list[tuple[int, int, EngineId]]:
    entries = [(-engine.num_free, engine.stay, engine.engine) for engine in engines]
    heapq.heapify(entries)
    return entries
