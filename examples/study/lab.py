"""What the study's curves are made of: runs of one scenario on changed layouts, and their gains.

Owns: the base scenario, the layouts that stand side by side. Must not know: curves, pictures.
Invariants: everything is examples/paper/E0.toml with what a curve names changed; all layouts see
the traces of the same seeds; staleness is bounded by the scenario's own value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from opengyre.config.load_simulation import load_simulation
from opengyre.config.simulation import SimulationConfig
from opengyre.control.commands import AnyCommand, DispatchGroups, OpenStep, Plan
from opengyre.control.facts import Fact, GroupAssigned
from opengyre.control.ids import GroupId
from opengyre.simulate.compare import Bench
from opengyre.simulate.from_config import scenario_of
from opengyre.simulate.plan import Trials, Tried, gain
from opengyre.simulate.plan_layout import Layout, Space
from opengyre.simulate.plan_workload import at_share, piled, training_share
from opengyre.simulate.repeat import Repeater
from opengyre.simulate.scenario import Scenario
from opengyre.simulate.workload import Draw
from opengyre.simulate.world import simulate

E0 = Path(__file__).resolve().parent.parent / "paper" / "E0.toml"
UNIT = 4  # nodes of the smallest cell: E0's
SIZES = (4, 8, 16)
MAX_LAYOUTS = 72
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """`num_seeds`: seeds 1..n of every figure."""

    repeater: Repeater
    num_seeds: int

    def config(self, *overrides: str) -> SimulationConfig:
        return load_simulation(E0, overrides)

    def trials(
        self,
        *overrides: str,
        num_devices: int | None = None,
        max_staleness: int | None = None,
        piled_share: float | None = None,
    ) -> Trials:
        """The base with `overrides`; `piled_share` of its executions end at a time-out, with
        training as dear as keeps its share of the device-seconds."""
        config = self.config(*overrides)
        bench = Bench(repeater=self.repeater, num_seeds=self.num_seeds)
        space = Space(
            num_devices=num_devices or config.topology.num_devices,
            cell_devices=SIZES,
            slots=(config.topology.slots_per_device,),
            max_staleness=config.schedule.max_staleness if max_staleness is None else max_staleness,
        )
        trials = Trials(config=config, space=space, bench=bench, max_layouts=MAX_LAYOUTS)
        if piled_share is None:
            return trials
        workload = piled(trials.workload, piled_share)
        share = training_share(config, trials.workload)
        return replace(
            trials,
            config=at_share(config, workload, share),
            bench=replace(bench, workload=workload),
        )

    def run(self, trials: Trials, layouts: Sequence[Layout]) -> list[Tried]:
        return trials.run(layouts, first_seed=1, num_seeds=self.num_seeds)


def elastic(trials: Trials, num_cells: int = 8, shape: Shape = (3, 1)) -> Layout:
    """All devices in `num_cells` cells; one cell is the streaming colocation of all devices."""
    space, slots = trials.space, trials.space.slots[-1]
    devices = space.num_devices // num_cells
    found = space.elastic(num_cells, devices, slots)
    if num_cells == 1:
        found = space.one_cell("colocate", space.num_units, slots)
    return _shaped(found, shape)


def colocated(trials: Trials, num_standalone: int, shape: Shape) -> Layout:
    space = trials.space
    found = space.one_cell("colocate", space.num_units - num_standalone, space.slots[-1])
    return _shaped(found, shape)


def split(trials: Trials, num_training: int, shape: Shape) -> Layout:
    """`num_training` devices always train."""
    units = num_training // UNIT
    return _shaped(trials.space.one_cell("async", units, trials.space.slots[-1]), shape)


def best_split(lab: Lab, trials: Trials, shape: Shape = (1, 3)) -> Tried:
    """Of all splits by whole cells, under the figure's own seeds: the static side's choice is
    favoured by that, never the elastic one's."""
    nums = range(UNIT, trials.space.num_devices, UNIT)
    tried = lab.run(trials, [split(trials, num, shape) for num in nums])
    return max(tried, key=lambda one: one.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """What dropping overdue groups takes away, over all seeds: the share of dispatched groups, and
    the mean duration of their executions over that of all, had they run to their end."""

    dropped_share: float
    duration_ratio: float


@dataclass(slots=True, kw_only=True, eq=False)
class DropWatch:
    """Reads a journal: groups that were neither assigned nor young enough when a step opened."""

    bound: int
    waiting: dict[GroupId, int] = field(default_factory=dict)
    all: list[GroupId] = field(default_factory=list)
    overdue: list[GroupId] = field(default_factory=list)

    def see(self, _now_s: float, value: Fact | Plan) -> None:
        if isinstance(value, GroupAssigned):
            del self.waiting[value.group]
        elif isinstance(value, Plan):
            for command in value.commands:
                self._take(command)

    def _take(self, command: AnyCommand) -> None:
        if isinstance(command, DispatchGroups):
            for group, _ in command.groups:
                self.waiting[group] = command.version
                self.all.append(group)
        elif isinstance(command, OpenStep):
            oldest = command.version - self.bound
            for group in [name for name, version in self.waiting.items() if version < oldest]:
                del self.waiting[group]
                self.overdue.append(group)


def bias_of_dropping(lab: Lab, config: SimulationConfig) -> Bias:
    """Void groups are none of those dropped. Raises ValueError if the run counted others."""
    scenario = scenario_of(config)
    dropped_s: list[float] = []
    all_s: list[float] = []
    num_dropped = 0
    for seed in range(1, lab.num_seeds + 1):
        watch = DropWatch(bound=config.schedule.max_staleness)
        result = simulate(scenario, seed, journal=watch.see)
        found = [one for one in watch.overdue if not _is_void(scenario, seed, one)]
        if len(found) != result.num_dropped:
            raise ValueError(f"{len(found)} overdue groups, but {result.num_dropped} dropped")
        num_dropped += len(found)
        dropped_s += [one.duration_s for group in found for one in _draws(scenario, seed, group)]
        all_s += [one.duration_s for group in watch.all for one in _draws(scenario, seed, group)]
    return Bias(
        dropped_share=num_dropped * scenario.scheduler.group_size / len(all_s),
        duration_ratio=fmean(dropped_s) / fmean(all_s) if dropped_s else math.nan,
    )


def _draws(scenario: Scenario, seed: int, group: GroupId) -> list[Draw]:
    number = int(group.removeprefix("g"))
    return [
        scenario.workload.draw(seed, number, member)
        for member in range(scenario.scheduler.group_size)
    ]


def _is_void(scenario: Scenario, seed: int, group: GroupId) -> bool:
    num_valid = sum(one.has_verdict for one in _draws(scenario, seed, group))
    return num_valid < scenario.scheduler.min_valid_members


def percent(one: Tried, other: Tried) -> tuple[float, float]:
    """(gain of `one` over `other`, two standard errors), in per cent."""
    over = gain(one, other)
    return 100.0 * over.share, 200.0 * (over.error or 0.0)


def per_device_day(one: Tried) -> tuple[float, float]:
    """(groups per device-day, two standard errors of the mean)."""
    rates = [24.0 * rate / one.num_devices for rate in one.groups_per_hour]
    mean = fmean(rates)
    spread = sum((rate - mean) ** 2 for rate in rates) / max(1, len(rates) - 1)
    return mean, 2.0 * math.sqrt(spread / len(rates))


def _shaped(layout: Layout | None, shape: Shape) -> Layout:
    if layout is None:
        raise ValueError("this layout does not fit the budget")
    return replace(layout, steps_per_burst=shape[0], run_ahead=shape[1])
