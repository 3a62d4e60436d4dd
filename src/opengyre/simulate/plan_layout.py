"""Layouts of a device budget, and which of them stand side by side.

Owns: Layout, the grid a search begins with, the neighbours it goes on with. Must not know: how
good a layout is. Invariants: a layout of a Space keeps its budget and its staleness bound; grids
and neighbours are in a fixed order without repetition.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from opengyre.config.simulation import PolicyName, SimulationConfig, simulation_problems
from opengyre.seams.errors import ConfigError

Size = TypeVar("Size", int, float)

CELL_SHARES = (1.0, 0.75)
COLOCATED_SHARES = (1.0, 0.875, 0.5)
NUM_STRIDES = 16


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """`num_cells` cells that can train, of `devices_per_cell` devices each; the rest of the budget
    is standalone engines. A static split is one cell that always trains."""

    policy: PolicyName
    num_cells: int
    devices_per_cell: int
    num_standalone: int
    devices_per_standalone: int
    slots_per_device: float
    steps_per_burst: int
    run_ahead: int

    @property
    def num_devices(self) -> int:
        cells = self.num_cells * self.devices_per_cell
        return cells + self.num_standalone * self.devices_per_standalone

    @property
    def words(self) -> str:
        """`elastic: 8 cells x 4 devices, mu 3, phi 1, 17.5 slots per device`."""
        alone = ""
        if self.num_standalone:
            alone = f" + {self.num_standalone} standalone x {self.devices_per_standalone}"
        if self.policy == "async":
            cells = f"{self.devices_per_cell} devices train"
            alone = f", {self.num_standalone} engines x {self.devices_per_standalone} roll out"
        elif self.num_cells == 1:
            cells = f"all {self.devices_per_cell} devices switch together"
        else:
            cells = f"{self.num_cells} cells x {self.devices_per_cell} devices"
        shape = f"mu {self.steps_per_burst}, phi {self.run_ahead}"
        return f"{self.policy}: {cells}{alone}, {shape}, {self.slots_per_device:g} slots per device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be laid out. `unit`: devices of the smallest cell and of a standalone engine, which
    the model needs at least; cell_devices: sizes that a cell may have, ascending, the first is
    `unit`; slots: per device, ascending; max_staleness bounds phi + mu - 1."""

    num_devices: int
    cell_devices: tuple[int, ...]
    slots: tuple[float, ...]
    max_staleness: int

    def __post_init__(self) -> None:
        if self.unit > self.num_devices:
            raise ConfigError(
                f"device budget {self.num_devices}: expected at least {self.unit}, the devices of "
                "the smallest cell"
            )

    @property
    def unit(self) -> int:
        return self.cell_devices[0]

    @property
    def num_units(self) -> int:
        return self.num_devices // self.unit

    def elastic(self, num_cells: int, devices: int, slots: float) -> Layout | None:
        """None if it does not fit or could move nothing: one cell, or no cell at all."""
        if num_cells < 2 or num_cells * devices > self.num_devices:
            return None
        return self._layout("elastic", num_cells, devices, slots)

    def one_cell(self, policy: PolicyName, num_units: int, slots: float) -> Layout | None:
        """All that trains in one cell. None if nothing is left that trains, or rolls out."""
        most = self.num_units - (policy == "async")
        if not 1 <= num_units <= most:
            return None
        return self._layout(policy, 1, num_units * self.unit, slots)

    def grid(self, policy: PolicyName, training_share: float) -> list[Layout]:
        """Where a search begins; static splits around that of the device-seconds."""
        found: list[Layout | None] = []
        for slots in self.slots:
            if policy == "elastic":
                for devices in self.cell_devices:
                    nums = [round(share * self.num_devices / devices) for share in CELL_SHARES]
                    found += [self.elastic(num, devices, slots) for num in nums]
            else:
                found += [
                    self.one_cell(policy, num, slots) for num in self._units(policy, training_share)
                ]
        return _each_once(
            replace(one, steps_per_burst=steps, run_ahead=ahead)
            for one in found
            if one is not None
            for steps, ahead in self.grid_shapes()
        )

    def grid_shapes(self) -> list[tuple[int, int]]:
        """(mu, phi) on the bound: the longest bursts, and single steps."""
        bound = self.max_staleness
        shapes = {(bound + 1, 0), (max(1, bound), min(1, bound)), (1, bound)}
        return sorted(shapes, reverse=True)

    def neighbours(self, layout: Layout) -> list[Layout]:
        """What differs from `layout` by one step in one direction."""
        found: list[Layout | None] = []
        slots, num, devices = layout.slots_per_device, layout.num_cells, layout.devices_per_cell
        if layout.policy == "elastic":
            found += [self.elastic(num + by, devices, slots) for by in (-1, 1)]
            found += [
                self.elastic(layout.num_cells * devices // other, other, slots)
                for other in _beside(self.cell_devices, devices)
            ]
        else:
            units, strides = devices // self.unit, (-self._stride, -1, 1, self._stride)
            found += [self.one_cell(layout.policy, units + by, slots) for by in strides]
        moved = [
            replace(one, steps_per_burst=layout.steps_per_burst, run_ahead=layout.run_ahead)
            for one in found
            if one is not None
        ]
        moved += [replace(layout, slots_per_device=other) for other in _beside(self.slots, slots)]
        moved += [
            replace(layout, steps_per_burst=steps, run_ahead=ahead)
            for steps, ahead in self._shapes_beside(layout.steps_per_burst, layout.run_ahead)
        ]
        return [one for one in _each_once(moved) if one != layout]

    def _layout(self, policy: PolicyName, num_cells: int, devices: int, slots: float) -> Layout:
        return Layout(
            policy=policy,
            num_cells=num_cells,
            devices_per_cell=devices,
            num_standalone=(self.num_devices - num_cells * devices) // self.unit,
            devices_per_standalone=self.unit,
            slots_per_device=slots,
            steps_per_burst=1,
            run_ahead=self.max_staleness,
        )

    def splits(self, training_share: float) -> list[int]:
        """Units that train in static splits near the balanced one: a stride below, two above."""
        balanced, most = int(training_share * self.num_units), self.num_units - 1
        near = (balanced + by * self._stride for by in (-1, 0, 1, 2))
        return sorted({min(max(1, units), most) for units in near})

    @property
    def _stride(self) -> int:
        return max(1, self.num_units // NUM_STRIDES)

    def _units(self, policy: PolicyName, training_share: float) -> list[int]:
        if policy == "async":
            return self.splits(training_share)
        return [round(share * self.num_units) for share in COLOCATED_SHARES]

    def _shapes_beside(self, steps: int, ahead: int) -> list[tuple[int, int]]:
        steps_by = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))
        near = [(steps + one, ahead + other) for one, other in steps_by]
        return [
            (mu, phi)
            for mu, phi in near
            if mu >= 1 and phi >= 0 and mu + phi - 1 <= self.max_staleness
        ]


def configured(config: SimulationConfig, layout: Layout, *, max_staleness: int) -> SimulationConfig:
    """The scenario on `layout`. The load curve keeps its meaning per device: with other slots an
    engine is full at another load. Raises ConfigError if they clash."""
    topology = config.topology.model_copy(
        update={
            "num_cells": layout.num_cells,
            "devices_per_cell": layout.devices_per_cell,
            "num_standalone": layout.num_standalone,
            "devices_per_standalone": layout.devices_per_standalone,
            "slots_per_device": layout.slots_per_device,
        }
    )
    schedule = config.schedule.model_copy(
        update={
            "policy": layout.policy,
            "num_training_cells": 1 if layout.policy == "async" else 0,
            "steps_per_burst": layout.steps_per_burst,
            "run_ahead": layout.run_ahead,
            "max_staleness": max_staleness,
        }
    )
    slope = config.costs.engine.load_slope * layout.slots_per_device
    engine = config.costs.engine.model_copy(
        update={"load_slope": slope / config.topology.slots_per_device}
    )
    costs = config.costs.model_copy(update={"engine": engine})
    changed = config.model_copy(
        update={"topology": topology, "schedule": schedule, "costs": costs, "failures": ()}
    )
    if problems := simulation_problems(changed):
        raise ConfigError("\n".join(f"{layout.words}: {one}" for one in problems))
    return changed


def slowdown(config: SimulationConfig, slots_per_device: float) -> float:
    """How much longer an execution takes on a full engine of `slots_per_device` than on one of the
    scenario's: (1 + b') / (1 + b) for the share of its time that is not in tools."""
    slope = config.costs.engine.load_slope
    full = (1.0 + slope * slots_per_device / config.topology.slots_per_device) / (1.0 + slope)
    in_tools = config.costs.tools.share
    return in_tools + (1.0 - in_tools) * full


def _beside(values: Sequence[Size], value: Size) -> list[Size]:
    """The next lower and the next higher of ascending `values`."""
    lower = [one for one in values if one < value][-1:]
    return lower + [one for one in values if one > value][:1]


def _each_once(layouts: Iterable[Layout]) -> list[Layout]:
    return list(dict.fromkeys(layouts))
