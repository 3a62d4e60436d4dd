"""The three policies: which cells change roles, and when there is enough to train on (rule 13).

Owns: the Policy interface and elastic, colocate, async behind it. Must not know: stages of a move,
commands, time.
Invariants: a policy reads and changes nothing; dispatch, order, staleness, slots and losses are
the same under each, so that traces compare.
"""

from typing import Protocol

from opengyre.control.cells import Cell, CellRole
from opengyre.control.config import PolicyName, SchedulerConfig
from opengyre.control.topology import Topology


class Policy(Protocol):
    """`can_recall`: cells in training may be called back when slots are lost (rule 10)."""

    can_recall: bool

    def num_fixed(self, config: SchedulerConfig) -> int:
        """Cells 0..n-1 that always train."""
        ...

    def next_cells(self, topology: Topology) -> tuple[Cell, ...]:
        """The cells that leave rollout together, next; () if none can."""
        ...

    def retainable(self, topology: Topology) -> tuple[Cell, ...]:
        """Cells that stay in training over a boundary, all or none, by the test of rule 9."""
        ...

    def whole_supply(self, *, step: int, burst: int) -> int:
        """Without streaming: the groups that must be ready, of `step` groups that the open or next
        step still needs and `burst` groups that the rest of the burst can still get."""
        ...


class Elastic:
    """The next cell in order leaves alone, as soon as the others cover the waterlevel."""

    can_recall = True

    def num_fixed(self, config: SchedulerConfig) -> int:
        return 0

    def next_cells(self, topology: Topology) -> tuple[Cell, ...]:
        cell = topology.next_in_order
        if cell is None or not cell.in_order or cell.role is not CellRole.ROLLOUT:
            return ()
        return (cell,)

    def retainable(self, topology: Topology) -> tuple[Cell, ...]:
        return (topology.core,) if topology.core.role is CellRole.TRAINING else ()

    def whole_supply(self, *, step: int, burst: int) -> int:
        return step


class Colocate:
    """All cells leave together, when the standalone engines cover what is left to roll out."""

    can_recall = True

    def num_fixed(self, config: SchedulerConfig) -> int:
        return 0

    def next_cells(self, topology: Topology) -> tuple[Cell, ...]:
        """Later ones are those whose transition was abandoned."""
        if topology.core.role not in (CellRole.ROLLOUT, CellRole.TRAINING):
            return ()
        serving = topology.cells_by_role[CellRole.ROLLOUT].values()
        return tuple(sorted((one for one in serving if one.in_order), key=lambda one: one.cell))

    def retainable(self, topology: Topology) -> tuple[Cell, ...]:
        cells = tuple(one for one in topology.cells if one.in_order)
        return cells if all(one.role is CellRole.TRAINING for one in cells) else ()

    def whole_supply(self, *, step: int, burst: int) -> int:
        return burst


class FixedSplit:
    """`async`: the first cells always train, the others and the standalone engines never do."""

    can_recall = False

    def num_fixed(self, config: SchedulerConfig) -> int:
        return config.num_training_cells

    def next_cells(self, topology: Topology) -> tuple[Cell, ...]:
        return ()

    def retainable(self, topology: Topology) -> tuple[Cell, ...]:
        return ()

    def whole_supply(self, *, step: int, burst: int) -> int:
        return step


POLICIES: dict[PolicyName, Policy] = {
    PolicyName.ELASTIC: Elastic(),
    PolicyName.COLOCATE: Colocate(),
    PolicyName.ASYNC: FixedSplit(),
}
