"""Simulated runs as rows of figures: means over seeds, each with its divisor.

Owns: what a row holds, its JSON and CSV. Must not know: files, terminals, how a run is simulated.
Invariants: a row's device-seconds add up to devices times wall time; a row of several seeds gives
means, and the standard deviation of the wall time over seeds; a ratio is a ratio of means.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from opengyre.control.facts import Outcome
from opengyre.simulate.result import Bucket, Result
from opengyre.simulate.scenario import Scenario

S_PER_HOUR = 3600.0
# figures of a Result that a row holds as plain means over its seeds, under the same name
MEANS = (
    "slack",
    "occupancy",
    "moves_per_execution",
    "switch_share",
    "num_switches",
    "num_publications",
    "num_short",
    "num_void",
    "num_filtered",
    "num_dropped",
    "stalled_s",
    "recomputed_tokens",
    "kv_moved_tokens",
    "aborted_s",
    "num_events",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scenario: means over `num_seeds` runs.

    means: see MEANS and Result. executions_per_device_hour: executions of consumed groups over
    devices x wall time. staleness: consumed groups by staleness, over all seeds. timed_out_share:
    closed executions that a cap ended. note: what was chosen for this row. reason: why a run
    failed, empty if none did.
    """

    name: str
    policy: str
    num_devices: int
    num_seeds: int
    wall_s: float
    wall_sd_s: float
    executions_per_device_hour: float
    timed_out_share: float
    means: dict[str, float]
    device_seconds: dict[Bucket, float]
    staleness: dict[int, int]
    note: str = ""
    reason: str = ""


def row_of(scenario: Scenario, results: Sequence[Result], *, policy: str, note: str = "") -> Row:
    """One row of the runs of one scenario; there is at least one."""
    walls = [one.wall_s for one in results]
    return Row(
        name=scenario.name,
        policy=policy,
        num_devices=scenario.num_devices,
        num_seeds=len(results),
        wall_s=fmean(walls),
        wall_sd_s=stdev(walls) if len(walls) > 1 else 0.0,
        executions_per_device_hour=fmean(_work_rate(scenario, one) for one in results),
        timed_out_share=fmean(_timed_out_share(one) for one in results),
        means={name: fmean(float(getattr(one, name)) for one in results) for name in MEANS},
        device_seconds={
            bucket: fmean(one.device_seconds.get(bucket, 0.0) for one in results)
            for bucket in Bucket
        },
        staleness=_staleness(results),
        note=note,
        reason=next((one.reason for one in results if one.failed), ""),
    )


def as_json(row: Row, reference: Row) -> dict[str, Any]:
    """One object of `gyre simulate --json`; `ratio` is wall time over that of `reference`."""
    return {
        "name": row.name,
        "policy": row.policy,
        "note": row.note,
        "num_devices": row.num_devices,
        "num_seeds": row.num_seeds,
        "wall_s": row.wall_s,
        "wall_sd_s": row.wall_sd_s,
        "ratio": ratio(row, reference),
        "executions_per_device_hour": row.executions_per_device_hour,
        "timed_out_share": row.timed_out_share,
        **row.means,
        "device_seconds": {bucket.value: row.device_seconds[bucket] for bucket in Bucket},
        "staleness": {str(key): value for key, value in row.staleness.items()},
        "failed": bool(row.reason),
        "reason": row.reason,
    }


def as_csv(rows: Sequence[Row], reference: Row) -> str:
    """The same figures as lines; nested ones get a column each (`device_seconds.training`)."""
    return csv_of([as_json(row, reference) for row in rows])


def csv_of(objects: Sequence[dict[str, Any]]) -> str:
    """Objects as lines under the names of all their columns."""
    flat = [_flat(one) for one in objects]
    names = list(dict.fromkeys(name for one in flat for name in one))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def text_rows(rows: Sequence[Row], reference: Row) -> list[dict[str, str]]:
    """The table for people: a line for each figure, a column for each scenario."""
    columns = {f"{row.name} {row.policy}": _text_cells(row, reference) for row in rows}
    names = _text_cells(reference, reference)
    return [{"": name} | {title: one[name] for title, one in columns.items()} for name in names]


def _text_cells(row: Row, reference: Row) -> dict[str, str]:
    total_s = sum(row.device_seconds.values()) or 1.0
    num_groups = sum(row.staleness.values()) or 1
    ages = range(max(row.staleness, default=0) + 1)
    return {
        "wall time": f"{duration(row.wall_s)}{' (failed)' if row.reason else ''}",
        "sd (seeds)": f"{row.wall_sd_s / (row.wall_s or 1.0):.1%} ({row.num_seeds})",
        "ratio": f"{ratio(row, reference):.3f}",
        "executions / device-hour": f"{row.executions_per_device_hour:.3f}",
        **{bucket.value: f"{row.device_seconds[bucket] / total_s:.2%}" for bucket in Bucket},
        "slack of training": f"{row.means['slack']:.1%}",
        "staleness 0/1/..": "/".join(f"{row.staleness.get(n, 0) / num_groups:.0%}" for n in ages),
        "moves / execution": f"{row.means['moves_per_execution']:.3f}",
        "switches": f"{row.means['num_switches']:.1f}",
        "ended by a time-out": f"{row.timed_out_share:.2%}",
        "aborted work": duration(row.means["aborted_s"]),
    }


def ratio(row: Row, reference: Row) -> float:
    """Of mean wall times; 0 if the reference took no time."""
    return row.wall_s / reference.wall_s if reference.wall_s else 0.0


def duration(value_s: float) -> str:
    """`12.3 h`, `4.5 min` or `6.7 s`."""
    if value_s >= S_PER_HOUR:
        return f"{value_s / S_PER_HOUR:.2f} h"
    return f"{value_s / 60:.1f} min" if value_s >= 60 else f"{value_s:.1f} s"


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _work_rate(scenario: Scenario, result: Result) -> float:
    num = sum(result.staleness.values()) * scenario.scheduler.group_size
    total_s = result.num_devices * result.wall_s
    return num * S_PER_HOUR / total_s if total_s else 0.0


def _timed_out_share(result: Result) -> float:
    num = sum(result.outcomes.values())
    return result.outcomes.get(Outcome.TIMED_OUT, 0) / num if num else 0.0


def _staleness(results: Sequence[Result]) -> dict[int, int]:
    keys = sorted({key for one in results for key in one.staleness})
    return {key: sum(one.staleness.get(key, 0) for one in results) for key in keys}
