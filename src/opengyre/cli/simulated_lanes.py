"""Lanes of simulated runs, on the terminal and as a picture.

Owns: which runs are drawn under which title. Must not know: marks, colours (views have them).
"""

from collections.abc import Sequence
from pathlib import Path

from opengyre.simulate.compare import Ran
from opengyre.simulate.result import Result
from opengyre.simulate.table import duration
from opengyre.views.lane_picture import Lanes, LaneStretch, draw_lanes, text_lanes

MAX_PANELS = 12
MAX_MARKS, MIN_MARKS = 72, 20
NAME_COLUMNS = 6


def lane_lines(runs: Sequence[Ran], num_columns: int) -> list[str]:
    """Text lanes of the first seed of each run, on a terminal of `num_columns`."""
    num_marks = max(MIN_MARKS, min(MAX_MARKS, num_columns - NAME_COLUMNS))
    lines: list[str] = []
    for one in runs[:MAX_PANELS]:
        first = one.results[0]
        lanes = text_lanes(_lanes(first), end_s=first.wall_s, num_columns=num_marks)
        lines += ["", _title(one), *lanes]
    return lines


def write_lanes(runs: Sequence[Ran], path: Path) -> None:
    """The same as one PNG; at most MAX_PANELS of them."""
    panels = {
        _title(one): (_lanes(one.results[0]), one.results[0].wall_s) for one in runs[:MAX_PANELS]
    }
    draw_lanes(panels, path)


def _title(ran: Ran) -> str:
    first = ran.results[0]
    title = f"{ran.row.name} ({ran.row.policy}), seed {first.seed}: {duration(first.wall_s)}"
    return f"{title}, {ran.row.note}" if ran.row.note else title


def _lanes(result: Result) -> Lanes:
    lanes: dict[str, list[LaneStretch]] = {}
    for one in result.lanes:
        lanes.setdefault(one.engine, []).append(
            LaneStretch(mode=one.mode.value, start_s=one.from_s, end_s=one.to_s)
        )
    return lanes
