"""One simulated run, before it runs: what is there, what it costs, what is asked of it.

Owns: Scenario and Failure. Must not know: events, seeds.
Invariant: a failure names an engine of the scheduler's config.
"""

from dataclasses import dataclass

from opengyre.control.config import SchedulerConfig
from opengyre.control.errors import InvariantError
from opengyre.control.ids import EngineId
from opengyre.simulate.costs import Costs
from opengyre.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The process of `engine` (for a cell: the whole cell) dies at `at_s` and is up again after
    `restart_after_s`, or never. One that is dead already does not die again."""

    at_s: float
    engine: EngineId
    restart_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A device is whatever device-seconds are counted in: a GPU, or a node of them.
    `stop_after_step` ends the run when that step is committed (the first steps of a longer run,
    whose last burst is dispatched like the others). `max_s` bounds the simulated time: a run that
    lasts longer raises ConfigError: its numbers are the user's."""

    name: str
    scheduler: SchedulerConfig
    devices_per_cell: int
    devices_per_standalone: int
    costs: Costs
    workload: Workload
    failures: tuple[Failure, ...] = ()
    stop_after_step: int | None = None
    max_s: float = 1e9

    def __post_init__(self) -> None:
        names = {spec.engine for spec in self.scheduler.engines}
        for failure in self.failures:
            if failure.engine not in names:
                raise InvariantError(f"{self.name}: no engine {failure.engine} can fail")
        if self.stop_after_step is not None and self.stop_after_step < 1:
            raise InvariantError(f"{self.name}: stop_after_step >= 1")
        if self.devices_per_cell < 1 or self.devices_per_standalone < 1:
            raise InvariantError(f"{self.name}: every engine has a device")

    @property
    def num_devices(self) -> int:
        num_standalone = sum(spec.cell is None for spec in self.scheduler.engines)
        num_in_cells = self.scheduler.num_cells * self.devices_per_cell
        return num_in_cells + num_standalone * self.devices_per_standalone
