"""The published table beside ours.

Owns: which figure is compared with which. Must not know: the rows' settings, files, terminals.
Invariants: the reference is the row whose published time is 1; `ours` is a ratio of mean wall
times; the best split of an async row changes the split and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from opengyre.config.simulation import SimulationConfig
from opengyre.seams.errors import ConfigError
from opengyre.simulate.compare import Bench, Ran, best_split
from opengyre.simulate.table import ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """`ours` and `ours_sd`: ratio of means to the reference, and the deviation over seeds of the
    ratio to the reference's run of the same seed. best_split_cells, best_split_ours: for an async
    row, the number of training cells with the least mean wall time, and its ratio. reason: why a
    run failed, empty if none did."""

    row: str
    published: float
    ours: float
    ours_sd: float
    slack: float
    wall_s: float
    num_seeds: int
    training_cells: int
    best_split_cells: int | None
    best_split_ours: float | None
    reason: str

    @property
    def relative_error(self) -> float:
        return self.ours / self.published - 1.0


def paper_table(
    configs: Sequence[SimulationConfig], bench: Bench, *, has_best_splits: bool = True
) -> list[PaperRow]:
    """Rows by published time. Raises ConfigError if a row has none, or none is the reference."""
    for config in configs:
        if config.scenario.published_time is None:
            raise ConfigError(
                f"{config.scenario.name}: scenario.published_time is missing: expected the "
                "published time of this row, because --table compares with it"
            )
    rows = sorted(configs, key=_published)
    reference = next((place for place, one in enumerate(rows) if _published(one) == 1.0), None)
    if reference is None:
        raise ConfigError("scenario.published_time: expected one row with 1.0, the reference")
    runs = bench.run(rows)
    best = _best_splits(rows, bench) if has_best_splits else {}
    return [_row(one, runs[reference], best.get(one.config.scenario.name)) for one in runs]


def as_json(row: PaperRow) -> dict[str, Any]:
    """One object of `gyre simulate FOLDER --table --json`."""
    return {
        "row": row.row,
        "published": row.published,
        "ours": row.ours,
        "ours_sd": row.ours_sd,
        "relative_error": row.relative_error,
        "slack": row.slack,
        "wall_s": row.wall_s,
        "num_seeds": row.num_seeds,
        "training_cells": row.training_cells,
        "best_split_cells": row.best_split_cells,
        "best_split_ours": row.best_split_ours,
        "reason": row.reason,
    }


def text_cells(row: PaperRow) -> dict[str, Any]:
    """One line of the table for people."""
    best = "-"
    if row.best_split_ours is not None:
        best = f"{row.best_split_ours:.3f} ({row.best_split_cells} cells train)"
    return {
        "row": row.row,
        "published": f"{row.published:.3f}",
        "ours": "failed" if row.reason else f"{row.ours:.3f} +- {row.ours_sd:.3f}",
        "error": f"{row.relative_error:+.1%}",
        "slack": f"{row.slack:.3f}",
        "wall": f"{row.wall_s / 3600:.2f} h",
        "split": f"{row.training_cells} cells train" if row.training_cells else "-",
        "best split": best,
    }


def _published(config: SimulationConfig) -> float:
    return config.scenario.published_time or 0.0


def _best_splits(rows: Sequence[SimulationConfig], bench: Bench) -> dict[str, Ran]:
    """By row; the search takes few seeds, what it finds is run with all of them."""
    swept = [one for one in rows if one.schedule.policy == "async"]
    found = [best_split(one, bench.for_tuning())[1] for one in swept]
    return {one.config.scenario.name: one for one in bench.run(found)}


def _row(ran: Ran, reference: Ran, best: Ran | None) -> PaperRow:
    pairs = zip(ran.results, reference.results, strict=True)
    ratios = [one.wall_s / other.wall_s if other.wall_s else 0.0 for one, other in pairs]
    return PaperRow(
        row=ran.config.scenario.name,
        published=_published(ran.config),
        ours=ratio(ran.row, reference.row),
        ours_sd=stdev(ratios) if len(ratios) > 1 else 0.0,
        slack=ran.row.means["slack"],
        wall_s=ran.row.wall_s,
        num_seeds=len(ran.results),
        training_cells=ran.config.schedule.num_training_cells,
        best_split_cells=best.config.schedule.num_training_cells if best else None,
        best_split_ours=ratio(best.row, reference.row) if best else None,
        reason=ran.row.reason,
    )
