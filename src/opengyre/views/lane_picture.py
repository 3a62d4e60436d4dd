"""Lanes of engines, as text and as a picture: what each was for, over time.

Owns: marks, colours, layout. Must not know: where the lanes come from. Invariant: matplotlib is
imported only when a picture is drawn, through its object interface, without a display.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opengyre.store.observations import Activity
from opengyre.store.run_folder import check_free_space
from opengyre.views.report import COLOURS, DOTS_PER_INCH, INK, MIN_FREE_BYTES, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = {"rollout": ".", "training": "#", "moving": "x", "publishing": "|", "lost": "!"}
MODE_COLOURS = {
    "rollout": COLOURS[Activity.GENERATING],
    "training": COLOURS[Activity.TRAINING],
    "moving": COLOURS[Activity.MOVING],
    "publishing": COLOURS[Activity.PUBLISHING],
    "lost": INK,
}
MAX_LANES = 64
WIDTH_INCHES = 14.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStretch:
    """[start_s, end_s) of one engine in one mode, a key of MARKS."""

    mode: str
    start_s: float
    end_s: float


Lanes = Mapping[str, Sequence[LaneStretch]]


def text_lanes(lanes: Lanes, *, end_s: float, num_columns: int = 72) -> list[str]:
    """A line an engine; a column shows what the engine was for during most of it."""
    lines = []
    for engine, lane in _first(lanes):
        lines.append(f"{engine:>5} {''.join(_marks(lane, end_s, num_columns))}")
    legend = "  ".join(f"{mark} {mode}" for mode, mark in MARKS.items())
    lines.append(f"{'':>5} 0{f'{end_s / 3600:.1f} h':>{num_columns - 1}}")
    lines.append(f"{'':>5} {legend}")
    if len(lanes) > MAX_LANES:
        lines.append(f"{'':>5} the first {MAX_LANES} of {len(lanes)} engines")
    return lines


def draw_lanes(panels: Mapping[str, tuple[Lanes, float]], path: Path) -> None:
    """One panel for each (title, (lanes, end in s)), on one time axis, as PNG.

    Raises ConfigError if there is no space for it.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_free_space(path.absolute().parent, MIN_FREE_BYTES)
    heights = [1.2 + 0.24 * min(len(lanes), MAX_LANES) for lanes, _ in panels.values()]
    end_s = max(one for _, one in panels.values())
    with rc_context(STYLE):
        size = (WIDTH_INCHES, 0.8 + sum(heights))
        figure = Figure(figsize=size, dpi=DOTS_PER_INCH, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
        for place, (title, (lanes, _)) in enumerate(panels.items()):
            axes = figure.add_subplot(grid[place, 0])
            _draw_panel(axes, title, lanes)
            axes.set_xlim(0.0, end_s / 3600 or 1.0)
        axes.set_xlabel("simulated hours")
        _legend(figure)
        partial = path.with_name(path.name + ".partial")
        figure.savefig(partial, format="png")
        partial.replace(path)


def _first(lanes: Lanes) -> Iterable[tuple[str, Sequence[LaneStretch]]]:
    return list(lanes.items())[:MAX_LANES]


def _marks(lane: Sequence[LaneStretch], end_s: float, num_columns: int) -> list[str]:
    column_s = (end_s or 1.0) / num_columns
    covered: list[dict[str, float]] = [{} for _ in range(num_columns)]
    for stretch in lane:
        first = min(int(stretch.start_s / column_s), num_columns - 1)
        last = min(int(stretch.end_s / column_s), num_columns - 1)
        for column in range(first, last + 1):
            begin, end = column * column_s, (column + 1) * column_s
            inside = min(stretch.end_s, end) - max(stretch.start_s, begin)
            if inside > 0:
                seconds = covered[column]
                seconds[stretch.mode] = seconds.get(stretch.mode, 0.0) + inside
    return [MARKS[max(one, key=lambda mode: one[mode])] if one else " " for one in covered]


def _draw_panel(axes: "Axes", title: str, lanes: Lanes) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    shown = list(_first(lanes))
    for height, (_, lane) in enumerate(reversed(shown)):
        for mode, colour in MODE_COLOURS.items():
            spans = [
                (one.start_s / 3600, (one.end_s - one.start_s) / 3600)
                for one in lane
                if one.mode == mode
            ]
            if spans:
                axes.broken_barh(spans, (height - 0.38, 0.76), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(shown)), [name for name, _ in reversed(shown)])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=mode) for mode, colour in MODE_COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
