"""A plan as data and as lines.

Owns: the keys of `gyre plan --json`, the lines of its table. Must not know: files, terminals.
Invariant: every figure says how many seeds it is the mean of.
"""

from typing import Any

from opengyre.simulate.plan import Gain, Plan, Tried, gain, verdict
from opengyre.simulate.plan_layout import Space
from opengyre.simulate.plan_region import NUM_REGION_SEEDS, Point, Region, pays_where


def plan_json(best: Plan, space: Space, region: Region | None) -> dict[str, Any]:
    """Everything that `gyre plan` found; times are not in it, so that it is the same each time."""
    static = best.of("async")
    return {
        "num_devices": space.num_devices,
        "max_staleness": space.max_staleness,
        "best": _layout_json(best.best[0], best),
        "verdict": verdict(best),
        "does_elasticity_pay": _does_pay(best),
        "layouts": [_layout_json(one, best) for one in best.best],
        "has_static_split": static is not None,
        "num_layouts_tried": best.num_tried,
        "num_runs": best.num_runs + (region.num_runs if region else 0),
        "is_cut_short": best.is_cut_short,
        "region": None if region is None else _region_json(region),
    }


def plan_rows(best: Plan) -> list[dict[str, str]]:
    """The table for people: a line for each policy's best layout, whose words stand elsewhere."""
    static = best.of("async")
    return [
        {
            f"means of {len(one.groups_per_hour)} seeds": one.layout.policy,
            "groups / h": f"{one.mean:.2f}",
            "per device-day": f"{24.0 * one.per_device:.3f}",
            "over the best static split": "-"
            if static is None or one is static
            else gain(one, static).words,
        }
        for one in best.best
    ]


def region_lines(region: Region) -> list[str]:
    """The grid of gains over the best static split, and where elasticity does not pay."""
    shares = list(dict.fromkeys(one.training_share for one in region.workloads))
    lines = [
        f"elastic over the best static split, {NUM_REGION_SEEDS} seeds a point, splits swept anew:",
        f"{'at the time-out':>16} | training share of the device-seconds",
        f"{'':>16} | " + " ".join(f"{share:>7.0%}" for share in shares),
    ]
    for time_out in dict.fromkeys(one.time_out_share for one in region.workloads):
        row = [one for one in region.workloads if one.time_out_share == time_out]
        cells = " ".join(f"{one.over_static.share:>+7.1%}" for one in row)
        lines.append(f"{time_out:>16.0%} | {cells}")
    counts = " ".join(
        f"{one.num_cells}: {one.over_static.share:+.1%}" for one in region.cell_counts
    )
    return [*lines, f"by number of cells: {counts}", *pays_where(region)]


def _does_pay(best: Plan) -> bool | None:
    """Against the best of the others. None if there is none, or no clear difference."""
    elastic = best.of("elastic")
    rivals = [one for one in best.best if one is not elastic]
    if elastic is None or not rivals:
        return None
    over = gain(elastic, rivals[0])
    return over.share > 0 if over.is_clear else None


def _layout_json(one: Tried, best: Plan) -> dict[str, Any]:
    static, layout = best.of("async"), one.layout
    return {
        "policy": layout.policy,
        "num_cells": layout.num_cells,
        "devices_per_cell": layout.devices_per_cell,
        "num_standalone": layout.num_standalone,
        "devices_per_standalone": layout.devices_per_standalone,
        "slots_per_device": layout.slots_per_device,
        "steps_per_burst": layout.steps_per_burst,
        "run_ahead": layout.run_ahead,
        "num_devices_used": layout.num_devices,
        "groups_per_hour": one.mean,
        "groups_per_device_hour": one.per_device,
        "num_seeds": len(one.groups_per_hour),
        "over_static": None if static is None else _gain_json(gain(one, static)),
    }


def _region_json(region: Region) -> dict[str, Any]:
    return {
        "num_seeds": NUM_REGION_SEEDS,
        "workloads": [_point_json(one) for one in region.workloads],
        "cell_counts": [_point_json(one) for one in region.cell_counts],
        "words": pays_where(region),
    }


def _point_json(one: Point) -> dict[str, Any]:
    colocate = one.over_colocate
    return {
        "training_share": one.training_share,
        "time_out_share": one.time_out_share,
        "num_cells": one.num_cells,
        "over_static": _gain_json(one.over_static),
        "over_colocate": None if colocate is None else _gain_json(colocate),
        "static_training_devices": one.training_devices,
    }


def _gain_json(value: Gain) -> dict[str, float | None]:
    return {"share": value.share, "standard_error": value.error}
