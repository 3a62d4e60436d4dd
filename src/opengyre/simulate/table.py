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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scenario: means over `num_seeds` runs.

    executions_per_device_hour: executions of consumed groups over devices x wall time.
    slack: idle share of the device-time in the training role. staleness: consumed groups by
    staleness, over all seeds. moves_per_execution: live moves over closed executions.
    switch_share: share of all device-seconds spent moving. timed_out_share: closed executions
    that a cap ended. aborted_s: execution-seconds of work thrown away. note: what was chosen for
    this row. reason: why a run failed, empty if none did.
    """

    name: str
    policy: str
    num_devices: int
    num_seeds: int
    wall_s: float
    wall_sd_s: float
    executions_per_device_hour: float
    device_seconds: dict[Bucket, float]
    slack: float
    staleness: dict[int, int]
    moves_per_execution: float
    switches: float
    switch_share: float
    timed_out_share: float
    aborted_s: float
    events: float
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
        device_seconds={
            bucket: fmean(one.device_seconds.get(bucket, 0.0) for one in results)
            for bucket in Bucket
        },
        slack=fmean(one.slack for one in results),
        staleness=_staleness(results),
        moves_per_execution=fmean(one.moves_per_execution for one in results),
        switches=fmean(one.num_switches for one in results),
        switch_share=fmean(one.switch_share for one in results),
        timed_out_share=fmean(_timed_out_share(one) for one in results),
        aborted_s=fmean(one.aborted_s for one in results),
        events=fmean(one.num_events for one in results),
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
        "ratio": row.wall_s / reference.wall_s,
        "executions_per_device_hour": row.executions_per_device_hour,
        "slack": row.slack,
        "moves_per_execution": row.moves_per_execution,
        "switches": row.switches,
        "switch_share": row.switch_share,
        "timed_out_share": row.timed_out_share,
        "aborted_s": row.aborted_s,
        "events": row.events,
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


def text_cells(row: Row, reference: Row) -> dict[str, Any]:
    """One line of the table for people."""
    total_s = sum(row.device_seconds.values()) or 1.0
    shares = {bucket: row.device_seconds[bucket] / total_s for bucket in Bucket}
    waiting = (Bucket.WAITING_FOR_COVERAGE, Bucket.WAITING_FOR_SUPPLY, Bucket.WAITING_FOR_DATA)
    num_groups = sum(row.staleness.values()) or 1
    return {
        "scenario": row.name,
        "policy": row.policy,
        "wall": duration(row.wall_s),
        "+-": f"{row.wall_sd_s / row.wall_s:.1%}" if row.wall_s else "-",
        "ratio": round(row.wall_s / reference.wall_s, 3),
        "exec/dev-h": round(row.executions_per_device_hour, 3),
        "generating": f"{shares[Bucket.GENERATING]:.1%}",
        "training": f"{shares[Bucket.TRAINING]:.1%}",
        "waiting c/s/d": "/".join(f"{shares[one]:.1%}" for one in waiting),
        "moving": f"{shares[Bucket.MOVING]:.2%}",
        "publishing": f"{shares[Bucket.PUBLISHING]:.2%}",
        "end": f"{shares[Bucket.IDLE_AT_END]:.1%}",
        "slack": f"{row.slack:.1%}",
        "staleness": " ".join(
            f"{key}:{value / num_groups:.0%}" for key, value in row.staleness.items()
        ),
        "moves/exec": round(row.moves_per_execution, 3),
        "aborted": f"{row.aborted_s:.0f}",
    }


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
