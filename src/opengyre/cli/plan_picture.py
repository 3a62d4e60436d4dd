"""plan.png: the best layouts, and where elasticity pays.

Owns: the picture's panels. Must not know: how a figure was found. Invariant: matplotlib is
imported only when a picture is drawn, through its object interface, without a display.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from opengyre.simulate.plan import Plan, verdict
from opengyre.simulate.plan_region import NUM_REGION_SEEDS, Region
from opengyre.views.report import CAPACITY, DOTS_PER_INCH, FAINT, GRID, INK, STYLE, WATER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (13.0, 4.2)
MOST_GAIN = 0.5


def draw_plan(best: Plan, region: Region | None, path: Path) -> None:
    """Write it as PNG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(verdict(best), fontsize=12)
        if region is None:
            _draw_best(figure.subplots(), best)
        else:
            axes = figure.subplots(1, 3, width_ratios=(2, 3, 2))
            _draw_best(axes[0], best)
            _draw_workloads(axes[1], region)
            _draw_counts(axes[2], region)
        figure.savefig(path)


def _draw_best(axes: "Axes", best: Plan) -> None:
    names = [one.layout.policy for one in best.best]
    rates = [one.mean for one in best.best]
    colours = [WATER if name == "elastic" else FAINT for name in names]
    axes.barh(range(len(names)), rates, color=colours)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"groups per hour, best layout, {len(best.best[0].groups_per_hour)} seeds")


def _draw_workloads(axes: "Axes", region: Region) -> None:
    shares = list(dict.fromkeys(one.training_share for one in region.workloads))
    caps = list(dict.fromkeys(one.time_out_share for one in region.workloads))
    gains = [one.over_static.share for one in region.workloads]
    rows = [gains[at : at + len(shares)] for at in range(0, len(gains), len(shares))]
    axes.imshow(rows, cmap="RdYlGn", vmin=-MOST_GAIN, vmax=MOST_GAIN, aspect="auto")
    for place, one in enumerate(region.workloads):
        words = f"{one.over_static.share:+.0%}"
        at = (place % len(shares), place // len(shares))
        axes.text(*at, words, ha="center", va="center", color=INK)
    axes.set_xticks(range(len(shares)), [f"{share:.0%}" for share in shares])
    axes.set_yticks(range(len(caps)), [f"{cap:.0%}" for cap in caps])
    axes.set_xlabel("training share of the device-seconds")
    axes.set_ylabel("executions at the time-out")
    axes.set_title(f"elastic over the best static split, {NUM_REGION_SEEDS} seeds", fontsize=11)


def _draw_counts(axes: "Axes", region: Region) -> None:
    counts = [one.num_cells for one in region.cell_counts]
    gains = [100.0 * one.over_static.share for one in region.cell_counts]
    errors = [200.0 * (one.over_static.error or 0.0) for one in region.cell_counts]
    axes.axhline(0.0, color=CAPACITY, linewidth=1)
    axes.errorbar(range(len(counts)), gains, yerr=errors, color=WATER, marker="o", capsize=3)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.grid(color=GRID)
    axes.set_xlabel("number of cells, same devices")
    axes.set_ylabel("% over the best static split")
