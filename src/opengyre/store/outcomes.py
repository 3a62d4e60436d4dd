"""How executions of a run ended, from the tables of `run.db`.

Must not know: tokens, views. Invariant: reads only, also beside the run's writer.
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from opengyre.seams.errors import BoundaryError
from opengyre.store.codec import decode
from opengyre.store.journal import open_for_reading
from opengyre.store.observations import LaunchRecorded, TurnRecorded

_QUERY = """
SELECT execution, e.group_name, e.task, e.version, outcome, reward, verdict, consumed_step,
  exclusion
FROM executions e LEFT JOIN groups g ON e.group_name = g.group_name
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOutcome:
    """`group` is "" for an evaluation; `version` is the policy's at dispatch. None: not told.

    `num_dropped_turns`: turns of launches that were given up, those with the lowest numbers.
    `exclusion`: why it takes no part in its group though it has a reward, "" if it does.
    """

    execution: str
    group: str = ""
    task: str = ""
    is_evaluation: bool = False
    version: int | None = None
    outcome: str | None = None
    reward: float | None = None
    verdict_reason: str | None = None
    step: int | None = None
    num_dropped_turns: int = 0
    exclusion: str = ""


def read_outcomes(db_path: Path) -> dict[str, ExecutionOutcome]:
    """By execution. Raises ConfigError, BoundaryError."""
    try:
        with closing(open_for_reading(db_path)) as db:
            dropped = _dropped_turns(db)
            return {row[0]: _outcome(row, dropped.get(row[0], 0)) for row in db.execute(_QUERY)}
    except sqlite3.Error as error:
        reason = f"cannot read {db_path}: {error}"
        raise BoundaryError("journal", reason, retryable=False) from error


def _outcome(row: tuple[object, ...], num_dropped: int) -> ExecutionOutcome:
    execution, group, task, version, outcome, reward, verdict, step, exclusion = row
    return ExecutionOutcome(
        execution=str(execution),
        group=str(group or ""),
        task=str(task or ""),
        is_evaluation=group is None,
        version=int(str(version)),
        outcome=None if outcome is None else str(outcome),
        reward=None if reward is None else float(str(reward)),
        verdict_reason=None if verdict is None else str(verdict),
        step=None if step is None else int(str(step)),
        num_dropped_turns=num_dropped,
        exclusion=str(exclusion or ""),
    )


def _dropped_turns(db: sqlite3.Connection) -> dict[str, int]:
    """Of executions that were launched more than once: the last turn before the last launch."""
    again = {row[0] for row in db.execute("SELECT execution FROM executions WHERE num_launches>1")}
    last: dict[str, int] = {}
    dropped: dict[str, int] = {}
    if not again:
        return dropped
    for (body,) in db.execute("SELECT body FROM journal WHERE kind='observation' ORDER BY seq"):
        match decode(body.encode()):
            case TurnRecorded(turn=turn) if turn.execution in again:
                number = int(turn.turn.rpartition(".t")[2])
                last[turn.execution] = max(number, last.get(turn.execution, 0))
            case LaunchRecorded(execution=execution) if execution in again:
                dropped[execution] = last.get(execution, 0)
            case _:
                continue
    return dropped
