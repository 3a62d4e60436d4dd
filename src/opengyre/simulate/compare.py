"""Policies on the same trace: what each makes of one scenario.

Owns: the variants of a scenario, and the search for the best static split. Must not know: files,
terminals. Invariants: every variant has the same devices, workload, seeds, dispatch rule,
max_staleness and overdue rule; a choice made for a row is stated in its note.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opengyre.config.simulation import PolicyName, SimulationConfig, simulation_problems
from opengyre.seams.errors import ConfigError
from opengyre.simulate.from_config import scenario_of
from opengyre.simulate.repeat import Repeater
from opengyre.simulate.result import Result
from opengyre.simulate.scenario import Scenario
from opengyre.simulate.table import Row, row_of
from opengyre.simulate.workload import Workload

MAX_TUNING_SEEDS = 4
NUM_POINTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A scenario and what its runs came to."""

    config: SimulationConfig
    results: list[Result]
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How scenarios are run: under seeds first_seed, first_seed + 1, ... `workload`, if given,
    replaces that of every scenario file."""

    repeater: Repeater
    num_seeds: int
    workload: Workload | None = None
    first_seed: int = 1

    def run(self, configs: Sequence[SimulationConfig], notes: Sequence[str] = ()) -> list[Ran]:
        """All scenarios, in the order given, each with its note."""
        scenarios = [self._scenario(config) for config in configs]
        seeds = range(self.first_seed, self.first_seed + self.num_seeds)
        all_results = self.repeater.run(scenarios, seeds)
        words = notes or [""] * len(configs)
        return [
            Ran(
                config=config,
                results=results,
                row=row_of(scenario, results, policy=config.schedule.policy, note=note),
            )
            for config, scenario, results, note in zip(
                configs, scenarios, all_results, words, strict=True
            )
        ]

    def mean_wall_s(self, configs: Sequence[SimulationConfig]) -> list[float]:
        """Infinite for a scenario with a run that failed: it is never the best."""
        return [math.inf if one.row.reason else one.row.wall_s for one in self.run(configs)]

    def for_tuning(self) -> "Bench":
        """The same with few seeds: the trace is shared, so that differences are small in noise."""
        return replace(self, num_seeds=min(self.num_seeds, MAX_TUNING_SEEDS))

    def _scenario(self, config: SimulationConfig) -> Scenario:
        return scenario_of(config, self.workload)


def compare(
    config: SimulationConfig,
    policies: Sequence[PolicyName],
    bench: Bench,
    *,
    is_best_static: bool,
) -> list[Ran]:
    """One entry a policy. With `is_best_static` colocate and async are tuned by mean wall time;
    else they take (mu, phi) and the split as given, or half the cells.

    Raises ConfigError if the layout has no room for a fixed split.
    """
    configs, notes = [], []
    for policy in policies:
        chosen = under(config, policy)
        note = "" if policy == "elastic" else shape_words(chosen)
        if policy != "elastic" and is_best_static:
            chosen = tuned(chosen, bench.for_tuning())
            note = f"the best of all: {shape_words(chosen)}"
        configs.append(chosen)
        notes.append(note)
    return bench.run(configs, notes)


def under(config: SimulationConfig, policy: PolicyName) -> SimulationConfig:
    """The scenario under `policy`: async takes the split of the file, or half the cells.

    Raises ConfigError if the layout has no room for a fixed split.
    """
    if policy != "async":
        return with_schedule(config, policy=policy, num_training_cells=0)
    num = config.schedule.num_training_cells or max(1, config.topology.num_cells // 2)
    return with_split(config, num)


def with_schedule(config: SimulationConfig, **changes: object) -> SimulationConfig:
    """The same scenario with other values in `[schedule]`. Raises ConfigError if they clash."""
    schedule = config.schedule.model_copy(update=changes)
    changed = config.model_copy(update={"schedule": schedule})
    if problems := simulation_problems(changed):
        raise ConfigError("\n".join(f"{config.scenario.name}: {one}" for one in problems))
    return changed


def with_split(config: SimulationConfig, num_training_cells: int) -> SimulationConfig:
    return with_schedule(config, policy="async", num_training_cells=num_training_cells)


def tuned(config: SimulationConfig, bench: Bench) -> SimulationConfig:
    """The (mu, phi) of the same phi + mu with the least mean wall time: as given, single steps,
    or nothing that outlives its burst; for async with the best split of each."""
    schedule = config.schedule
    depth = schedule.steps_per_burst + schedule.run_ahead
    shapes = sorted({(schedule.steps_per_burst, schedule.run_ahead), (1, depth - 1), (depth, 0)})
    shaped = [
        with_schedule(config, steps_per_burst=steps, run_ahead=ahead) for steps, ahead in shapes
    ]
    if schedule.policy == "async":
        found = [best_split(one, bench) for one in shaped]
    else:
        found = list(zip(bench.mean_wall_s(shaped), shaped, strict=True))
    return min(found, key=lambda one: one[0])[1]


def best_split(config: SimulationConfig, bench: Bench) -> tuple[float, SimulationConfig]:
    """(mean wall time, config) of the best number of training cells, the rest as it is."""

    def wall_s(nums: Sequence[int]) -> list[float]:
        return bench.mean_wall_s([with_split(config, num) for num in nums])

    num, least_s = _least(wall_s, 1, max(1, num_splits(config)))
    return least_s, with_split(config, num)


def num_splits(config: SimulationConfig) -> int:
    """Splits train 1..n cells and leave something to roll out."""
    topology = config.topology
    return topology.num_cells - (0 if topology.num_standalone else 1)


def shape_words(config: SimulationConfig) -> str:
    """`5 of 8 cells train, mu 1, phi 3`."""
    schedule = config.schedule
    words = f"mu {schedule.steps_per_burst}, phi {schedule.run_ahead}"
    if schedule.policy != "async":
        return words
    return f"{schedule.num_training_cells} of {config.topology.num_cells} cells train, {words}"


def _least(
    measure: Callable[[Sequence[int]], list[float]], low: int, high: int
) -> tuple[int, float]:
    """The integer of low..high with the least measure, which is taken to have one valley: a grid
    of at most NUM_POINTS, then ever finer ones around its best point."""
    known: dict[int, float] = {}
    while True:
        step = max(1, -(-(high - low) // (NUM_POINTS - 1)))
        wanted = [num for num in {*range(low, high, step), high} if num not in known]
        known.update(zip(sorted(wanted), measure(sorted(wanted)), strict=True) if wanted else ())
        best = min(known, key=lambda num: (known[num], num))
        if step == 1:
            return best, known[best]
        low, high = max(low, best - step + 1), min(high, best + step - 1)
