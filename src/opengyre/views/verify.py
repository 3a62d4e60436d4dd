"""`gyre run verify`: the promises a run folder can prove by itself.

Owns: putting the checks together. Must not know: the scheduler, engines, the trainer.
Invariant: reads run.db and token segments alone, and changes nothing.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from opengyre.store.journal import Row, open_for_reading, read_journal
from opengyre.store.run_folder import RunFolder
from opengyre.store.segments import SegmentReader
from opengyre.views.check_control import (
    Boundaries,
    Coverage,
    OneOutcome,
    RowCheck,
    TrainingPrefix,
    Waterlevel,
)
from opengyre.views.check_steps import ExactlyOnce
from opengyre.views.check_tokens import TokenChecks
from opengyre.views.findings import CheckResult
from opengyre.views.fold import Fold


def verify_run(folder: RunFolder) -> list[CheckResult]:
    """P1-P5, P8 and P10, in this order. Raises ConfigError, BoundaryError if unreadable."""
    return verify_rows(
        read_journal(folder.db), SegmentReader(folder.tokens), recorded_outcomes(folder.db)
    )


def verify_rows(
    rows: Iterable[Row],
    reader: SegmentReader,
    recorded: Mapping[str, str | None] | None = None,
) -> list[CheckResult]:
    """The checks over `rows`; `recorded` is the executions table where there is one."""
    fold, boundaries, steps = Fold(), Boundaries(), ExactlyOnce()
    checks: list[RowCheck] = [
        OneOutcome(recorded),
        Waterlevel(boundaries),
        Coverage(boundaries),
        TrainingPrefix(boundaries),
    ]
    for row in rows:
        fold.apply(row)
        for check in (*checks, steps):
            check.see(row, fold.state)
        boundaries.see(row, fold.state)
    results = [check.finish(fold.state) for check in checks]
    once = steps.finish(fold.state)
    unbroken, exact = TokenChecks(reader).check(fold.state, steps.accepted())
    return [*results, unbroken, once, exact]


def recorded_outcomes(path: Path) -> dict[str, str | None]:
    """The executions table: execution -> outcome."""
    with closing(open_for_reading(path)) as db:
        return dict(db.execute("SELECT execution, outcome FROM executions").fetchall())
