"""`report.png`: one run on one page.

Owns: the picture's panels, colours and marks. Must not know: files other than its output, how a
number came about. Invariant: matplotlib is imported only when a picture is drawn, through its
object interface, without a display.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from opengyre.store.observations import Activity
from opengyre.store.run_folder import check_free_space
from opengyre.views.lanes import Stretch
from opengyre.views.run_state import EngineView, RunState
from opengyre.views.summary import mean_eval, rewards_by_number, summarise
from opengyre.views.words import number, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (16.0, 12.0)
DOTS_PER_INCH = 100
MIN_FREE_BYTES = 16 * 2**20

INK = "#22262b"
FAINT = "#8a9099"
GRID = "#e4e7eb"
WATER = "#1f5f99"
CAPACITY = "#c2571a"
READY = "#2e7d4f"
NEEDED = "#b08500"
COLOURS = {
    Activity.GENERATING: "#4f9bd9",
    Activity.TRAINING: "#e07b39",
    Activity.WAITING_FOR_DATA: "#f4c99f",
    Activity.WAITING_FOR_COVERAGE: "#b9d6c2",
    Activity.WAITING_FOR_SUPPLY: "#d9e3ec",
    Activity.MOVING: "#7a4fa3",
    Activity.PUBLISHING: "#2a9d8f",
    Activity.IDLE_AT_END: "#eceef0",
}
STYLE: dict[Any, Any] = {
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "font.size": 11.0,
}


def draw_report(state: RunState, path: Path) -> None:
    """Write the picture of the run to `path` as PNG of 1600 x 1200 pixels.

    Raises ConfigError if there is no space for it.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_free_space(path.absolute().parent, MIN_FREE_BYTES)
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, facecolor="white")
        FigureCanvasAgg(figure)
        _draw(figure, state)
        partial = path.with_name(path.name + ".partial")
        figure.savefig(partial, format="png")
        partial.replace(path)


def _draw(figure: "Figure", state: RunState) -> None:
    num_lanes = max(2, len(state.engines))
    grid = figure.add_gridspec(
        4,
        2,
        height_ratios=[0.55 * num_lanes, 2.4, 1.7, 2.2],
        width_ratios=[1.0, 1.0],
        left=0.075,
        right=0.975,
        top=0.845,
        bottom=0.06,
        hspace=0.44,
        wspace=0.27,
    )
    _head(figure, summarise(state))
    lanes = figure.add_subplot(grid[0, :])
    water = figure.add_subplot(grid[1, :], sharex=lanes)
    groups = figure.add_subplot(grid[2, :], sharex=lanes)
    _draw_lanes(lanes, state)
    _draw_waterlevel(water, state)
    _draw_groups(groups, state)
    lanes.tick_params(axis="x", labelbottom=False, length=0)
    for axes in (lanes, water, groups):
        _mark_publications(axes, state)
        axes.set_xlim(0.0, max(state.now_s, 1.0))
    groups.set_xlabel("seconds since the run began")
    _draw_rewards(figure.add_subplot(grid[3, 0]), state)
    _draw_split(figure.add_subplot(grid[3, 1]), state)


def _head(figure: "Figure", summary: dict[str, Any]) -> None:
    title = "OpenGyre run"
    if summary["seed"] is not None:
        title += f", seed {summary['seed']}"
    how = f"failed: {summary['reason']}" if summary["is_failed"] else "done"
    words = f"{how}, {seconds(summary['wall_s'])}, {number(summary['num_steps'], 'update')}"
    figure.text(0.075, 0.962, title, fontsize=19, fontweight="bold", va="center")
    figure.text(0.975, 0.962, words[:90], fontsize=12, color=FAINT, va="center", ha="right")
    for place, (name, value) in enumerate(_key_numbers(summary)):
        left = 0.075 + place * 0.129
        figure.text(left, 0.921, value, fontsize=15, fontweight="bold", va="center")
        figure.text(left, 0.898, name, fontsize=10, color=FAINT, va="center")


def _key_numbers(summary: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = summary["eval_before"], summary["eval_after"]
    told = ["-" if one is None else f"{one:.2f}" for one in (before, after)]
    kept = summary["retention_decisions"]
    return [
        ("eval reward", "none" if before is None else f"{told[0]} to {told[1]}"),
        ("role changes", str(summary["role_changes"])),
        ("mid-batch joins", str(summary["mid_batch_joins"])),
        ("live requests continued", str(summary["requests_continued"])),
        ("tokens lost", str(summary["tokens_lost"])),
        ("errors caused by moves", str(summary["harness_errors_from_moves"])),
        ("core retained / returned", f"{kept['retained']} / {kept['returned']}"),
    ]


def _style(axes: "Axes", title: str, *, has_grid: bool = True) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if has_grid:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(axes: "Axes", handles: list[Any], *, is_below: bool = False) -> None:
    """One line to the right of the title, or below the axes."""
    axes.legend(
        handles=handles,
        loc="upper left" if is_below else "lower right",
        bbox_to_anchor=(-0.005, -0.02) if is_below else (1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=9.5,
        borderaxespad=0.1,
        handlelength=1.3,
        columnspacing=1.1,
        handletextpad=0.5,
    )


def _lane_order(state: RunState) -> list[EngineView]:
    """Standalone engines on top, then satellites from last to first, the core at the bottom."""
    return sorted(
        state.engines.values(),
        key=lambda one: (one.cell is None, -1 if one.cell is None else one.cell, one.engine),
    )


def _lane_name(engine: EngineView) -> str:
    if engine.cell == 0:
        return f"core {engine.engine}"
    return f"{'cell' if engine.cell is not None else 'standalone'} {engine.engine}"


def _draw_lanes(axes: "Axes", state: RunState) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    _style(axes, "What each device did", has_grid=False)
    engines = _lane_order(state)
    used: set[Activity] = set()
    for height, engine in enumerate(engines):
        used |= _draw_lane(axes, height, state.lane(engine.engine))
    places = {engine.engine: height for height, engine in enumerate(engines)}
    _mark(axes, [(at, places.get(f"c{one.cell}")) for at, one in state.joins], "^", INK)
    moves = [(at, places.get(one.to_engine)) for at, one in state.continued]
    _mark(axes, moves, "o", "white")
    axes.set_yticks(range(len(engines)), [_lane_name(one) for one in engines])
    axes.set_ylim(-0.6, max(0, len(engines) - 1) + 0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    handles: list[Any] = [
        Patch(color=COLOURS[one], label=one.value.replace("_", " "))
        for one in Activity
        if one in used
    ]
    handles += [
        Line2D([], [], marker="^", color=INK, linestyle="none", markersize=7, label="join"),
        Line2D(
            [],
            [],
            marker="o",
            markerfacecolor="white",
            markeredgecolor=INK,
            linestyle="none",
            markersize=6,
            label="request continued",
        ),
        Line2D([], [], color=FAINT, linestyle=":", label="publication"),
    ]
    _legend(axes, handles, is_below=True)


def _draw_lane(axes: "Axes", height: int, lane: list[Stretch]) -> set[Activity]:
    by_activity: dict[Activity, list[tuple[float, float]]] = {}
    for stretch in lane:
        span = (stretch.start_s, stretch.length_s)
        by_activity.setdefault(stretch.activity, []).append(span)
    for activity, spans in by_activity.items():
        axes.broken_barh(spans, (height - 0.36, 0.72), facecolors=COLOURS[activity], linewidth=0)
    return set(by_activity)


def _mark(axes: "Axes", points: list[tuple[float, int | None]], marker: str, colour: str) -> None:
    known = [(at, height) for at, height in points if height is not None]
    axes.scatter(
        [at for at, _ in known],
        [height for _, height in known],
        marker=marker,
        s=34,
        color=colour,
        edgecolors=INK,
        linewidths=0.8,
        zorder=5,
    )


def _mark_publications(axes: "Axes", state: RunState) -> None:
    first: dict[int, float] = {}
    for at_s, one in state.published:
        first.setdefault(one.version, at_s)
    for at_s in first.values():
        axes.axvline(at_s, color=FAINT, linestyle=":", linewidth=1.2, zorder=1)


def _draw_waterlevel(axes: "Axes", state: RunState) -> None:
    _style(axes, "Waterlevel against capacity: a cell may leave once w fits into what remains")
    times, waterlevels, capacities, _, _ = _levels(state)
    (water,) = axes.step(times, waterlevels, where="post", color=WATER, linewidth=2.0)
    axes.fill_between(times, waterlevels, step="post", color=WATER, alpha=0.13, linewidth=0)
    (capacity,) = axes.step(times, capacities, where="post", color=CAPACITY, linewidth=1.8)
    water.set_label("w, executions not finished")
    capacity.set_label("C_R, rollout slots")
    axes.set_ylabel("executions, slots")
    axes.set_ylim(bottom=0)
    _legend(axes, [water, capacity])


def _draw_groups(axes: "Axes", state: RunState) -> None:
    _style(axes, "Groups: ready, and what the open step still takes")
    times, _, _, ready, needed = _levels(state)
    (line,) = axes.step(times, ready, where="post", color=READY, linewidth=1.8)
    axes.fill_between(times, ready, step="post", color=READY, alpha=0.15, linewidth=0)
    (need,) = axes.step(times, needed, where="post", color=NEEDED, linewidth=1.4, linestyle="--")
    line.set_label("ready")
    need.set_label("needed by the open step")
    axes.set_ylabel("groups")
    axes.set_ylim(bottom=0)
    _legend(axes, [line, need])


def _levels(
    state: RunState,
) -> tuple[list[float], list[int], list[int], list[int], list[int]]:
    samples = state.samples
    last = samples[-1:]
    return (
        [one.at_s for one in samples] + [state.now_s] * len(last),
        [one.waterlevel for one in (*samples, *last)],
        [one.capacity for one in (*samples, *last)],
        [one.num_ready for one in (*samples, *last)],
        [one.num_needed for one in (*samples, *last)],
    )


def _draw_rewards(axes: "Axes", state: RunState) -> None:
    from matplotlib.ticker import MaxNLocator

    _style(axes, "Reward by burst")
    known = [(burst, one) for burst, one in rewards_by_number(state).items() if one is not None]
    axes.bar(
        [burst for burst, _ in known],
        [one for _, one in known],
        color="#c9d7e4",
        width=0.72,
        label="training executions",
    )
    results = [(one.burst - 0.5, mean_eval(one)) for _, one in state.evals]
    places = [place for place, mean in results if mean is not None]
    evals = [mean for _, mean in results if mean is not None]
    axes.plot(
        places,
        evals,
        color=CAPACITY,
        marker="o",
        markersize=8,
        linewidth=1.8,
        label="held-out evaluation",
    )
    for place, value in zip(places, evals, strict=True):
        axes.annotate(
            f"{value:.2f}",
            (place, value),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            fontweight="bold",
            color=CAPACITY,
        )
    tops, ends = [1.0, *evals, *(one for _, one in known)], [*places, *(one for one, _ in known)]
    axes.set_ylim(0.0, max(tops) * 1.12)
    axes.set_xlim(min(ends, default=0) - 0.6, max(ends, default=1) + 0.6)
    axes.set_xlabel("burst")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, axes.get_legend_handles_labels()[0])


def _draw_split(axes: "Axes", state: RunState) -> None:
    split = state.device_seconds()
    total = sum(split.values())
    _style(axes, f"Where {total:.0f} device-seconds went", has_grid=False)
    shown = [one for one in reversed(Activity) if split[one.value] > 0]
    for height, activity in enumerate(shown):
        value = split[activity.value]
        axes.barh(height, value, color=COLOURS[activity], height=0.68)
        axes.annotate(
            f"{value:.1f} s, {value / total:.1%}",
            (value, height),
            textcoords="offset points",
            xytext=(6, 0),
            va="center",
            fontsize=10,
        )
    names = [one.value.replace("_", " ") for one in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max([*split.values(), 1.0]) * 1.25)
    axes.set_xlabel("seconds, summed over devices")
