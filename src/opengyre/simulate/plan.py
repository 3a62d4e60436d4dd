"""The best layout of a device budget, and what elasticity gains over the best static split.

Owns: the search and its verdict. Must not know: files, terminals, clocks. Invariants: the search
is bounded by a number of layouts and is the same each time; every layout sees the same traces;
the seeds that judge the winners are not the seeds that chose them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from opengyre.config.simulation import PolicyName, SimulationConfig
from opengyre.simulate.compare import Bench
from opengyre.simulate.from_config import workload_of
from opengyre.simulate.plan_layout import Layout, Space, configured, slowdown
from opengyre.simulate.plan_workload import lengthened, training_share
from opengyre.simulate.result import Result
from opengyre.simulate.table import S_PER_HOUR
from opengyre.simulate.workload import Workload

POLICIES: tuple[PolicyName, ...] = ("elastic", "async", "colocate")
FIRST_SEARCH_SEED = 10_001
NUM_GRID_SEEDS, NUM_CLIMB_SEEDS = 2, 4
NUM_CLIMBERS = 2
CLEAR_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A layout and the groups it consumes per hour, one figure a seed."""

    layout: Layout
    groups_per_hour: tuple[float, ...]
    num_devices: int

    @property
    def mean(self) -> float:
        return fmean(self.groups_per_hour)

    @property
    def per_device(self) -> float:
        """Groups per hour and device of the budget, idle ones included."""
        return self.mean / self.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one layout consumes over another, less 1: of means, and the standard error of the
    ratio from run to run, which one seed does not have."""

    share: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Beyond chance (two standard errors) and beyond CLEAR_GAIN."""
        return self.error is not None and abs(self.share) > max(2.0 * self.error, CLEAR_GAIN)

    @property
    def words(self) -> str:
        error = "one seed" if self.error is None else f"standard error {self.error:.1%}"
        return f"{self.share:+.1%} ({error})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best layout of each policy that fits the budget, by groups per hour; the first is the
    best of all. num_tried: layouts; num_runs: simulated runs."""

    best: tuple[Tried, ...]
    num_tried: int
    num_runs: int
    is_cut_short: bool

    def of(self, policy: PolicyName) -> Tried | None:
        return next((one for one in self.best if one.layout.policy == policy), None)


@dataclass(slots=True, kw_only=True, eq=False)
class Trials:
    """Layouts of one scenario, run and remembered. `max_layouts` bounds those of the search."""

    config: SimulationConfig
    space: Space
    bench: Bench
    max_layouts: int
    workload: Workload = field(init=False)
    num_runs: int = field(init=False, default=0)
    _known: dict[tuple[Layout, int, int], Tried] = field(init=False, default_factory=dict)
    _seen: set[Layout] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.workload = self.bench.workload or workload_of(self.config.workload)

    @property
    def num_tried(self) -> int:
        return len(self._seen)

    @property
    def has_room(self) -> bool:
        return self.num_tried < self.max_layouts

    def search(self, layouts: Sequence[Layout], num_seeds: int) -> list[Tried]:
        """Under the first `num_seeds` seeds of the search; new ones as far as there is room."""
        chosen = []
        for layout in layouts:
            if layout in self._seen or self.has_room:
                self._seen.add(layout)
                chosen.append(layout)
        return self.run(chosen, first_seed=FIRST_SEARCH_SEED, num_seeds=num_seeds)

    def run(self, layouts: Sequence[Layout], *, first_seed: int, num_seeds: int) -> list[Tried]:
        """In the order given."""
        keys = [(one, first_seed, num_seeds) for one in layouts]
        missing = [one for one, *_ in dict.fromkeys(keys) if (one, *keys[0][1:]) not in self._known]
        for slots in dict.fromkeys(one.slots_per_device for one in missing):
            some = [one for one in missing if one.slots_per_device == slots]
            bench = replace(
                self.bench,
                first_seed=first_seed,
                num_seeds=num_seeds,
                workload=lengthened(self.workload, slowdown(self.config, slots)),
            )
            bound = self.space.max_staleness
            ran = bench.run([configured(self.config, one, max_staleness=bound) for one in some])
            self.num_runs += num_seeds * len(some)
            for layout, one in zip(some, ran, strict=True):
                self._known[layout, first_seed, num_seeds] = Tried(
                    layout=layout,
                    groups_per_hour=tuple(groups_per_hour(result) for result in one.results),
                    num_devices=self.space.num_devices,
                )
        return [self._known[key] for key in keys]


def groups_per_hour(result: Result) -> float:
    """Consumed groups; 0 for a run that failed."""
    if result.failed or result.wall_s <= 0:
        return 0.0
    return sum(result.staleness.values()) * S_PER_HOUR / result.wall_s


def plan(trials: Trials) -> Plan:
    """Search each policy, then judge the winners under the bench's own seeds."""
    found = _searched(trials)
    bench = trials.bench
    judged = trials.run(found, first_seed=bench.first_seed, num_seeds=bench.num_seeds)
    return Plan(
        best=tuple(sorted(judged, key=lambda one: -one.mean)),
        num_tried=trials.num_tried,
        num_runs=trials.num_runs,
        is_cut_short=not trials.has_room,
    )


def gain(one: Tried, other: Tried) -> Gain:
    """Of `one` over `other`, run under the same seeds."""
    if other.mean <= 0:
        return Gain(share=math.inf if one.mean > 0 else 0.0, error=0.0)
    ratios = [
        a / b for a, b in zip(one.groups_per_hour, other.groups_per_hour, strict=True) if b > 0
    ]
    error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    return Gain(share=one.mean / other.mean - 1.0, error=error)


def verdict(best: Plan) -> str:
    """One sentence: whether elasticity pays, and against what."""
    elastic, static = best.of("elastic"), best.of("async")
    if elastic is None:
        return "elasticity is not possible here: the budget holds fewer than two cells"
    rivals = [one for one in best.best if one.layout.policy != "elastic"]
    if not rivals:
        return "elasticity has no rival here: no static split fits the budget"
    if static is None:
        return _against(elastic, rivals[0], "colocate, because no static split fits the budget")
    words = _against(elastic, static, "the best static split")
    over = gain(rivals[0], elastic)
    if rivals[0] is static or (over.is_clear and over.share < 0):
        return words
    if over.is_clear:
        return f"{words}; but colocate is {over.share:.1%} quicker than elastic"
    return f"{words}; but colocate does as well, {over.words} over elastic"


def _against(elastic: Tried, rival: Tried, name: str) -> str:
    over = gain(elastic, rival)
    if not over.is_clear:
        return f"elasticity makes no clear difference here: {over.words} against {name}"
    if over.share > 0:
        return f"elasticity pays here: {over.words} against {name}"
    quicker = gain(rival, elastic)
    return f"elasticity does not pay here: {name} is {quicker.share:.1%} quicker"


@dataclass(slots=True, kw_only=True, eq=False)
class _Climb:
    """The best of a policy so far; `is_on_top` if no neighbour is better."""

    best: Tried
    is_on_top: bool = False

    def step(self, trials: Trials) -> None:
        beside = trials.search(trials.space.neighbours(self.best.layout), NUM_CLIMB_SEEDS)
        better = _ranked([self.best, *beside])[0]
        self.is_on_top = better.mean <= self.best.mean
        if not self.is_on_top:
            self.best = better


def _searched(trials: Trials) -> list[Layout]:
    """The best layout of each policy: a grid under few seeds; its best climb, in turns so that
    the bound cuts no policy short alone, to where no neighbour is better."""
    most = max(1, trials.max_layouts // (2 * len(POLICIES)))
    share = training_share(trials.config, trials.workload)
    grids = [_thinned(trials.space.grid(policy, share), most) for policy in POLICIES]
    ranked = [_ranked(trials.search(grid, NUM_GRID_SEEDS)) for grid in grids]
    starts = [[one.layout for one in some[:NUM_CLIMBERS]] for some in ranked if some]
    climbs = [[_Climb(best=one) for one in trials.search(some, NUM_CLIMB_SEEDS)] for some in starts]
    rounds = [one for some in climbs for one in some]
    while trials.has_room and (going := [one for one in rounds if not one.is_on_top]):
        for one in going:
            one.step(trials)
    return [_ranked([one.best for one in some])[0].layout for some in climbs]


def _thinned(layouts: Sequence[Layout], most: int) -> list[Layout]:
    """At most `most` of them, evenly."""
    if len(layouts) <= most:
        return list(layouts)
    return [layouts[place * len(layouts) // most] for place in range(most)]


def _ranked(tried: Sequence[Tried]) -> list[Tried]:
    """Best first; of equals the one with the lower layout."""
    return sorted(tried, key=lambda one: (-one.mean, one.layout))
