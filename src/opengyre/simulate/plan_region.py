"""Where elasticity pays and where it does not: the plan's winners on changed workloads.

Owns: the axes of the region and its points. Must not know: the search, pictures. Invariants: all
policies see the same traces; every policy may take another (mu, phi), and the static split is swept
anew; the elastic and the colocated winner keep their cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opengyre.simulate.plan import Gain, Plan, Trials, Tried, gain
from opengyre.simulate.plan_layout import Layout, Space
from opengyre.simulate.plan_workload import at_share, capped_share, piled, training_share
from opengyre.simulate.workload import Workload

TRAINING_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
TIME_OUT_SHARES = (0.0, 0.25, 0.6)
NUM_REGION_SEEDS = 3
MAX_CELL_COUNTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`training_share`: of the device-seconds that a group needs, those of training, when engines
    are full; `time_out_share`: executions that the time-out ends. Gains of the elastic winner;
    training_devices: those of the best static split here."""

    training_share: float
    time_out_share: float
    num_cells: int
    over_static: Gain
    over_colocate: Gain | None
    training_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """`workloads`: a grid of shares; `cell_counts`: the budget cut into fewer or more cells, on
    the workload as it is."""

    workloads: tuple[Point, ...]
    cell_counts: tuple[Point, ...]
    num_runs: int


def region(trials: Trials, best: Plan) -> Region | None:
    """None if the budget holds no elastic layout or no static split."""
    winners = _winners(best)
    if winners is None:
        return None
    points, num_runs = [], 0
    for time_out in TIME_OUT_SHARES:
        workload = piled(trials.workload, time_out)
        for share in TRAINING_SHARES:
            here = _at(trials, workload, share)
            points.append(_point(here, winners, share))
            num_runs += here.num_runs
    num_before = trials.num_runs
    counts = _cell_counts(trials, winners)
    num_runs += trials.num_runs - num_before
    return Region(workloads=tuple(points), cell_counts=tuple(counts), num_runs=num_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Winners:
    """The best layout of each policy on the workload as it is."""

    elastic: Layout
    static: Layout
    colocate: Layout | None


def _winners(best: Plan) -> Winners | None:
    elastic, static, colocate = (best.of(one) for one in ("elastic", "async", "colocate"))
    if elastic is None or static is None:
        return None
    return Winners(
        elastic=elastic.layout,
        static=static.layout,
        colocate=None if colocate is None else colocate.layout,
    )


def pays_where(region: Region) -> list[str]:
    """A line for each share at the time-out: the training shares where elasticity does not pay."""
    lines = []
    for time_out in dict.fromkeys(one.time_out_share for one in region.workloads):
        row = [one for one in region.workloads if one.time_out_share == time_out]
        lost = [one for one in row if not (one.over_static.is_clear and one.over_static.share > 0)]
        words = ", ".join(
            f"{one.training_share:.0%} ({one.over_static.share:+.1%})" for one in lost
        )
        where = (
            f"no clear gain at a training share of {words}" if lost else "a clear gain throughout"
        )
        lines.append(f"{time_out:.0%} of executions at the time-out: {where}")
    few = [
        f"{one.num_cells} ({one.over_static.share:+.1%})"
        for one in region.cell_counts
        if not (one.over_static.is_clear and one.over_static.share > 0)
    ]
    where = (
        f"no clear gain with {', '.join(few)}" if few else "a clear gain with every number tried"
    )
    return [*lines, f"number of cells, this workload: {where}"]


def _at(trials: Trials, workload: Workload, share: float) -> Trials:
    """The same with `workload` and training as dear as `share` says."""
    return replace(
        trials,
        config=at_share(trials.config, workload, share),
        bench=replace(trials.bench, workload=workload),
    )


def _splits(space: Space, like: Layout, share: float) -> list[Layout]:
    found = (space.one_cell("async", num, like.slots_per_device) for num in space.splits(share))
    return [_shaped(one, like) for one in found if one is not None]


def _point(here: Trials, winners: Winners, share: float) -> Point:
    splits = _splits(here.space, winners.static, share)
    split = max(_run(here, splits), key=lambda one: one.mean).layout
    static, elastic = _best_shape(here, split), _best_shape(here, winners.elastic)
    colocate = None if winners.colocate is None else _best_shape(here, winners.colocate)
    return Point(
        training_share=share,
        time_out_share=capped_share(here.workload),
        num_cells=elastic.layout.num_cells,
        over_static=gain(elastic, static),
        over_colocate=None if colocate is None else gain(elastic, colocate),
        training_devices=static.layout.devices_per_cell,
    )


def _best_shape(here: Trials, layout: Layout) -> Tried:
    """Its own (mu, phi), or one of the grid's."""
    shapes = dict.fromkeys([(layout.steps_per_burst, layout.run_ahead), *here.space.grid_shapes()])
    shaped = [replace(layout, steps_per_burst=steps, run_ahead=ahead) for steps, ahead in shapes]
    return max(_run(here, shaped), key=lambda one: one.mean)


def _cell_counts(trials: Trials, winners: Winners) -> list[Point]:
    """All devices in 2, 3, 4, 6, ... cells, as many as have whole numbers of devices."""
    space, static, slots = trials.space, winners.static, winners.elastic.slots_per_device
    nums = [num for num in range(2, space.num_units + 1) if space.num_devices % num == 0]
    some = nums[:: max(1, -(-len(nums) // MAX_CELL_COUNTS))]
    cut = (space.elastic(num, space.num_devices // num, slots) for num in some)
    layouts = [_shaped(one, winners.elastic) for one in cut if one is not None]
    ran = _run(trials, [static, *layouts])
    share = training_share(trials.config, trials.workload)
    time_out = capped_share(trials.workload)
    return [
        Point(
            training_share=share,
            time_out_share=time_out,
            num_cells=one.layout.num_cells,
            over_static=gain(one, ran[0]),
            over_colocate=None,
            training_devices=static.devices_per_cell,
        )
        for one in ran[1:]
    ]


def _shaped(layout: Layout, like: Layout) -> Layout:
    return replace(layout, steps_per_burst=like.steps_per_burst, run_ahead=like.run_ahead)


def _run(trials: Trials, layouts: Sequence[Layout]) -> list[Tried]:
    first_seed = trials.bench.first_seed
    return trials.run(layouts, first_seed=first_seed, num_seeds=NUM_REGION_SEEDS)
