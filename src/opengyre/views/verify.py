"""`gyre run verify`: the promises a run folder can prove by itself.

Owns: putting the checks together. Must not know: the scheduler, engines, the trainer.
Invariant: reads run.db and token segments alone, and changes nothing.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from opengyre.seams.records import TurnRecord
from opengyre.store.journal import Row, open_for_reading, read_journal
from opengyre.store.run_folder import RunFolder
from opengyre.store.segments import SegmentReader, segment_numbers
from opengyre.views.check_accounts import AccountChecks
from opengyre.views.check_control import (
    Boundaries,
    Coverage,
    OneOutcome,
    RowCheck,
    TrainingPrefix,
    Waterlevel,
)
from opengyre.views.check_handoffs import HandoffChecks
from opengyre.views.check_steps import ExactlyOnce
from opengyre.views.check_tokens import TokenChecks
from opengyre.views.check_verdicts import VerdictChecks
from opengyre.views.consumed import consumed_by
from opengyre.views.findings import CheckResult
from opengyre.views.fold import Fold
from opengyre.views.run_state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The executions table: outcome and reward of each execution."""

    outcomes: Mapping[str, str | None] = field(default_factory=dict)
    rewards: Mapping[str, float | None] = field(default_factory=dict)


def verify_run(folder: RunFolder) -> list[CheckResult]:
    """P1-P6, P8, P10-P12, P16, in this order. Raises ConfigError, BoundaryError if unreadable."""
    reader = SegmentReader(folder.tokens)
    return verify_rows(
        read_journal(folder.db),
        reader,
        recorded=read_recorded(folder.db),
        headers=_headers(reader, folder.tokens),
    )


def verify_rows(
    rows: Iterable[Row],
    reader: SegmentReader,
    *,
    recorded: Recorded | None = None,
    headers: Iterable[TurnRecord] = (),
) -> list[CheckResult]:
    """The checks over `rows`; `recorded` where there is a table; `headers` of all records."""
    fold, boundaries, steps, handoffs = Fold(), Boundaries(), ExactlyOnce(), HandoffChecks()
    checks: list[RowCheck] = [
        OneOutcome(None if recorded is None else recorded.outcomes),
        Waterlevel(boundaries),
        Coverage(boundaries),
        TrainingPrefix(boundaries),
    ]
    for row in rows:
        fold.apply(row)
        for check in (*checks, steps):
            check.see(row, fold.state)
        handoffs.see(row, fold.state)
        boundaries.see(row, fold.state)
    results = [check.finish(fold.state) for check in checks]
    once = steps.finish(fold.state)
    consumed = consumed_by(steps.reports(), fold.state)
    accounts = AccountChecks(fold.state, consumed)
    unbroken, exact = TokenChecks(reader).check(fold.state, steps.accepted(), also=accounts.see)
    ended = accounts.finish(_untold(headers, fold.state))
    verdicts = VerdictChecks(None if recorded is None else recorded.rewards)
    read, released = handoffs.finish(fold.state)
    no_zero = verdicts.check(fold.state, consumed)
    return [*results, unbroken, read, once, exact, ended, no_zero, released]


def read_recorded(path: Path) -> Recorded:
    with closing(open_for_reading(path)) as db:
        rows = db.execute("SELECT execution, outcome, reward FROM executions").fetchall()
    return Recorded(
        outcomes={row[0]: row[1] for row in rows}, rewards={row[0]: row[2] for row in rows}
    )


def _headers(reader: SegmentReader, tokens: Path) -> Iterable[TurnRecord]:
    for segment in segment_numbers(tokens):
        yield from reader.scan_headers(segment)


def _untold(headers: Iterable[TurnRecord], state: RunState) -> list[TurnRecord]:
    told = {(turn.ref.segment, turn.ref.offset_bytes) for turn in state.turns.values()}
    return [one for one in headers if (one.ref.segment, one.ref.offset_bytes) not in told]
