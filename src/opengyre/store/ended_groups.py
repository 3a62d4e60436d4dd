"""What each group came to as its last member ended: ready, void or filtered.

Owns: the rules a run was started with, and the groups' `ended` column. Must not know: steps, or
which row of the journal ended a member. Invariant: it is written once, and only when every
member has closed and has its last word.
"""

import math
import sqlite3

from opengyre.control.groups import GroupState, is_without_variance
from opengyre.store.observations import RunStarted

NEVER_RAN = "it never ran"

_MEMBERS = """
SELECT count(*), sum(outcome IS NOT NULL AND verdict IS NOT NULL), count(value), min(value),
  max(value)
FROM (
  SELECT outcome, verdict,
    CASE WHEN reward IS NOT NULL AND exclusion='' THEN coalesce(shaped, reward) END AS value
  FROM executions WHERE group_name=?)
"""


def take_rules(db: sqlite3.Connection, started: RunStarted) -> None:
    is_filtering = bool(started.scheduler.get("filter_zero_variance"))
    db.execute("DELETE FROM rules")
    db.execute("INSERT INTO rules VALUES(?,?)", (started.min_valid_members, int(is_filtering)))


def settle(db: sqlite3.Connection, where: str, value: str | int) -> None:
    """A member ended or has its last word: the execution whose column `where` is `value`."""
    found = db.execute(f"SELECT group_name FROM executions WHERE {where}=?", (value,)).fetchone()
    if found is None or found[0] is None:
        return
    (group,) = found
    num_members, num_done, num_valid, lowest, highest = db.execute(_MEMBERS, (group,)).fetchone()
    if num_done < num_members:
        return
    bounds = (math.inf, -math.inf) if num_valid == 0 else (lowest, highest)
    state = _state(db, num_valid, bounds)
    db.execute(
        "UPDATE groups SET ended=? WHERE group_name=? AND ended IS NULL", (state.value, group)
    )


def _state(db: sqlite3.Connection, num_valid: int, bounds: tuple[float, float]) -> GroupState:
    rules = db.execute("SELECT min_valid_members, is_filtering FROM rules").fetchone()
    min_valid_members, is_filtering = (1, 0) if rules is None else rules
    if num_valid < min_valid_members:
        return GroupState.VOID
    is_filtered = is_filtering and is_without_variance(*bounds)
    return GroupState.FILTERED if is_filtered else GroupState.READY
