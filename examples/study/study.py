"""Make the curves and tables of docs/study.md: one command, the same numbers each time.

Owns: which files are written. Must not know: what a curve compares. Invariant: a table in the
page and its picture come from the same runs; the page's prose is left alone.
Run: `python examples/study/study.py [--only cells] [--seeds 8]`; all of it takes some 15 minutes
of processor time.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from curves import FIGURES, Figure, Panel, overdue
from lab import Bias, Lab
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from opengyre.cli.plan_picture import draw_plan
from opengyre.simulate.plan import plan, verdict
from opengyre.simulate.plan_region import region
from opengyre.simulate.plan_words import plan_json, plan_rows, region_lines
from opengyre.simulate.repeat import Repeater
from opengyre.views.report import GRID, STYLE
from opengyre.views.tables import table

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, FOLDER = DOCS / "study.md", DOCS / "study"
COLOURS = ("#1f5f99", "#c2571a", "#2e7d4f")
HEIGHT_INCHES, WIDTH_INCHES, DOTS_PER_INCH = 3.6, 4.6, 90
NUM_SEEDS = 8
PLAN_LAYOUTS = 120


def main() -> None:
    names = (*FIGURES, "overdue", "plan")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=names, action="append", help="this figure; repeatable")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with Repeater(options.processes) as repeater:
        lab = Lab(repeater=repeater, num_seeds=options.seeds)
        for name in options.only or names:
            begin_s = time.monotonic()
            _fill(name, "\n".join(_made(name, lab)))
            print(f"{name}: {time.monotonic() - begin_s:.0f} s, {options.seeds} seeds")


def _made(name: str, lab: Lab) -> Iterator[str]:
    """The lines of a figure's block in the page; its picture is written beside."""
    if name == "plan":
        yield from _plan_lines(lab)
        return
    biases: dict[str, Bias] = {}
    if name == "overdue":
        figure, biases = overdue(lab)
    else:
        figure = FIGURES[name](lab)
        _draw(figure, FOLDER / f"{name}.png")
        yield f"![{name}](study/{name}.png)"
        yield ""
    for panel in figure.panels:
        yield from _table_lines(panel, lab.num_seeds)
    for words, bias in biases.items():
        yield (
            f"- {words}: {bias.dropped_share:.1%} of the dispatched groups are dropped; their "
            f"executions would have lasted {bias.duration_ratio:.2f} times the mean of all."
        )


def _plan_lines(lab: Lab) -> Iterator[str]:
    trials = lab.trials()
    trials.max_layouts = PLAN_LAYOUTS
    best = plan(trials)
    where = region(trials, best)
    draw_plan(best, where, FOLDER / "plan.png")
    data = json.dumps(plan_json(best, trials.space, where), indent=1)
    (FOLDER / "plan.json").write_text(data + "\n", encoding="utf-8")
    yield "![plan](study/plan.png)"
    yield ""
    yield "```"
    yield verdict(best)
    yield from table(plan_rows(best))
    yield from (one.layout.words for one in best.best)
    yield ""
    yield from region_lines(where) if where else ()
    yield "```"


def _table_lines(panel: Panel, num_seeds: int) -> Iterator[str]:
    """One line for each x; `+-` is two standard errors over the seeds."""
    yield f"{panel.y_label[0].upper()}{panel.y_label[1:]}, {num_seeds} seeds:"
    yield ""
    yield "| " + " | ".join([panel.x_label, *(line.label for line in panel.lines)]) + " |"
    yield "|---" * (1 + len(panel.lines)) + "|"
    for place, x in enumerate(panel.xs):
        cells = [
            f"{line.points[place][0]:.1f} +- {line.points[place][1]:.1f}" for line in panel.lines
        ]
        yield "| " + " | ".join([x, *cells]) + " |"
    yield ""


def _draw(figure: Figure, path: Path) -> None:
    num = len(figure.panels)
    with rc_context({**STYLE, "font.size": 9.0}):
        size = (WIDTH_INCHES * num, HEIGHT_INCHES)
        canvas = Canvas(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(canvas)
        for axes, panel in zip(
            canvas.subplots(1, num, squeeze=False)[0], figure.panels, strict=True
        ):
            _draw_panel(axes, panel)
        canvas.savefig(path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    places = range(len(panel.xs))
    for line, colour in zip(panel.lines, COLOURS, strict=False):
        values, errors = zip(*line.points, strict=True)
        axes.errorbar(
            places, values, yerr=errors, color=colour, marker="o", capsize=3, label=line.label
        )
    if panel.y_label.startswith("%"):
        axes.axhline(0.0, color="#8a9099", linewidth=1)
    axes.set_xticks(places, panel.xs)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(color=GRID)
    axes.legend(frameon=False)


def _fill(name: str, text: str) -> None:
    """Replace the block of this name in the page."""
    begin, end = f"<!-- {name}: made by examples/study/study.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    if not pattern.search(page):
        raise SystemExit(f"{PAGE.name}: no block {begin}")
    filled = f"{begin}\n{text.strip()}\n{end}"
    PAGE.write_text(pattern.sub(lambda _match: filled, page), encoding="utf-8")


if __name__ == "__main__":
    main()
