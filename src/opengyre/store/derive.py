"""The tables that answer questions quickly: executions, turns, groups, steps, versions, evals.

Owns: their columns and how each journal row changes them. Must not know: asyncio, or who writes.
Invariants: they hold nothing the journal does not; `rebuild` and row-by-row filling agree.
"""

import sqlite3
from pathlib import Path

import msgspec

from opengyre.control import commands, facts
from opengyre.control.ids import ExecutionId
from opengyre.store import observations as seen
from opengyre.store.codec import JournalValue, decode
from opengyre.store.ended_groups import NEVER_RAN, settle, take_rules

TABLES = ("executions", "turns", "groups", "steps", "versions", "evals", "rules")

DDL = """
CREATE TABLE executions(
  execution TEXT PRIMARY KEY, group_name TEXT, task TEXT, version INTEGER NOT NULL,
  burst INTEGER NOT NULL, dispatched_s REAL NOT NULL, engine TEXT, launched_s REAL,
  launch_command INTEGER,
  num_launches INTEGER NOT NULL DEFAULT 0, outcome TEXT, closed_s REAL,
  reward REAL, verdict TEXT, num_trainable_tokens INTEGER, shaped REAL, exclusion TEXT) STRICT;
CREATE INDEX executions_by_group ON executions(group_name);
CREATE INDEX executions_by_launch ON executions(launch_command);
CREATE TABLE turns(
  turn TEXT NOT NULL, attempt INTEGER NOT NULL, execution TEXT NOT NULL, parent TEXT NOT NULL,
  segment INTEGER NOT NULL, offset_bytes INTEGER NOT NULL, crc32 INTEGER NOT NULL,
  num_kept_tokens INTEGER NOT NULL, num_new_prompt_tokens INTEGER NOT NULL,
  num_completion_tokens INTEGER NOT NULL, num_continuations INTEGER NOT NULL,
  finish TEXT NOT NULL, is_committed INTEGER NOT NULL, received_s REAL NOT NULL,
  ended_s REAL NOT NULL, record TEXT NOT NULL, PRIMARY KEY(turn, attempt)) STRICT;
CREATE INDEX turns_by_execution ON turns(execution);
CREATE TABLE groups(
  group_name TEXT PRIMARY KEY, task TEXT, version INTEGER NOT NULL, burst INTEGER NOT NULL,
  size INTEGER NOT NULL, dispatched_s REAL NOT NULL, assigned_step INTEGER,
  consumed_step INTEGER, ended TEXT) STRICT;
CREATE TABLE steps(
  step INTEGER PRIMARY KEY, version_before INTEGER NOT NULL, version_after INTEGER NOT NULL,
  num_groups INTEGER NOT NULL, num_executions REAL NOT NULL, num_tokens INTEGER NOT NULL,
  loss REAL, grad_norm REAL, mean_reward REAL, is_applied INTEGER NOT NULL,
  is_short INTEGER NOT NULL, opened_s REAL NOT NULL, closed_s REAL NOT NULL,
  mean_shaped REAL) STRICT;
CREATE TABLE versions(
  engine TEXT NOT NULL, version INTEGER NOT NULL, published_s REAL NOT NULL,
  checksum INTEGER NOT NULL, held_s REAL NOT NULL, num_continued INTEGER NOT NULL) STRICT;
CREATE TABLE evals(
  burst INTEGER NOT NULL, version INTEGER NOT NULL, mean_reward REAL, num_rewards INTEGER NOT NULL,
  num_without_verdict INTEGER NOT NULL, later_token_share REAL NOT NULL, at_s REAL NOT NULL
) STRICT;
CREATE TABLE rules(min_valid_members INTEGER NOT NULL, is_filtering INTEGER NOT NULL) STRICT;
"""

_record = msgspec.json.Encoder()


def apply(db: sqlite3.Connection, now_s: float, value: JournalValue) -> None:
    """Change the tables by one journal row, inside the caller's transaction."""
    match value:
        case commands.Plan():
            for command in value.commands:
                _apply_command(db, now_s, command)
        case facts.ExecutionClosed():
            _close(db, now_s, value.execution, value.outcome.value)
        case facts.CommandFailed():
            db.execute(
                "UPDATE executions SET outcome=?, closed_s=?, verdict=coalesce(verdict, ?)"
                " WHERE launch_command=? AND outcome IS NULL",
                (facts.Outcome.FAILED.value, now_s, NEVER_RAN, value.command_id),
            )
            settle(db, "launch_command", value.command_id)
        case facts.VerdictGiven():
            db.execute(
                "UPDATE executions SET reward=?, verdict=?, num_trainable_tokens=?, shaped=?,"
                " exclusion=? WHERE execution=?",
                (
                    value.reward,
                    value.reason,
                    value.num_trainable_tokens,
                    value.shaped,
                    value.exclusion,
                    value.execution,
                ),
            )
            settle(db, "execution", value.execution)
        case facts.GroupAssigned():
            _assign(db, value.group, value.step)
        case facts.GroupReturned():
            _assign(db, value.group, None)
        case _:
            _apply_observation(db, now_s, value)


def rebuild(path: Path) -> int:
    """Drop the tables of `path` and fill them from its journal; returns the rows read."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("BEGIN IMMEDIATE")
        for table in TABLES:
            db.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in DDL.split(";"):
            db.execute(statement)
        num_rows = 0
        for now_s, body in db.execute("SELECT now_s, body FROM journal ORDER BY seq"):
            apply(db, now_s, decode(body.encode()))
            num_rows += 1
        db.execute("COMMIT")
    finally:
        db.close()
    return num_rows


def _apply_command(db: sqlite3.Connection, now_s: float, command: commands.AnyCommand) -> None:
    match command:
        case commands.DispatchGroups():
            for group, executions in command.groups:
                db.execute(
                    "INSERT OR IGNORE INTO groups(group_name, version, burst, size, dispatched_s)"
                    " VALUES(?,?,?,?,?)",
                    (group, command.version, command.burst, len(executions), now_s),
                )
                _dispatch(db, now_s, command, executions, group)
        case commands.DispatchEval():
            _dispatch(db, now_s, command, command.executions, None)
        case commands.Launch():
            db.execute(
                "UPDATE executions SET engine=?, launched_s=?, launch_command=? WHERE execution=?",
                (command.engine, now_s, command.command_id, command.execution),
            )
        case commands.Cancel(was_queued=True):
            db.execute(
                "UPDATE executions SET verdict=coalesce(verdict, ?) WHERE execution=?",
                (NEVER_RAN, command.execution),
            )
            _close(db, now_s, command.execution, facts.Outcome.CANCELLED.value)
        case commands.Reroute():
            db.executemany(
                "UPDATE executions SET engine=? WHERE execution=?",
                [(engine, execution) for execution, engine in command.moves],
            )
        case _:
            return


def _dispatch(
    db: sqlite3.Connection,
    now_s: float,
    command: commands.DispatchGroups | commands.DispatchEval,
    executions: tuple[ExecutionId, ...],
    group: str | None,
) -> None:
    db.executemany(
        "INSERT OR IGNORE INTO executions(execution, group_name, version, burst, dispatched_s)"
        " VALUES(?,?,?,?,?)",
        [(one, group, command.version, command.burst, now_s) for one in executions],
    )


def _close(db: sqlite3.Connection, now_s: float, execution: str, outcome: str) -> None:
    db.execute(
        "UPDATE executions SET outcome=?, closed_s=? WHERE execution=? AND outcome IS NULL",
        (outcome, now_s, execution),
    )
    settle(db, "execution", execution)


def _assign(db: sqlite3.Connection, group: str, step: int | None) -> None:
    db.execute("UPDATE groups SET assigned_step=? WHERE group_name=?", (step, group))


def _apply_observation(db: sqlite3.Connection, now_s: float, value: JournalValue) -> None:
    match value:
        case seen.RunStarted():
            take_rules(db, value)
        case seen.TurnRecorded():
            _insert_turn(db, value)
        case seen.LaunchRecorded():
            db.execute(
                "UPDATE executions SET task=?, num_launches=? WHERE execution=?",
                (value.task, value.launch_number, value.execution),
            )
        case seen.GroupTask():
            db.execute("UPDATE groups SET task=? WHERE group_name=?", (value.task, value.group))
        case seen.StepReport():
            _insert_step(db, value)
        case seen.VersionPublished():
            db.execute(
                "INSERT INTO versions VALUES(?,?,?,?,?,?)",
                (
                    value.engine,
                    value.version,
                    now_s,
                    value.checksum,
                    value.held_s,
                    value.num_continued,
                ),
            )
        case seen.EvalResult():
            _insert_eval(db, now_s, value)
        case _:
            return


def _insert_turn(db: sqlite3.Connection, value: seen.TurnRecorded) -> None:
    turn = value.turn
    row = (
        turn.turn,
        turn.attempt,
        turn.execution,
        turn.parent,
        turn.ref.segment,
        turn.ref.offset_bytes,
        turn.ref.crc32,
        turn.num_kept_tokens,
        turn.num_new_prompt_tokens,
        turn.num_completion_tokens,
        turn.num_continuations,
        turn.finish,
        int(turn.is_committed),
        turn.received_s,
        turn.ended_s,
        _record.encode(turn).decode(),
    )
    marks = ",".join("?" * len(row))
    db.execute(f"INSERT OR REPLACE INTO turns VALUES({marks})", row)


def _insert_step(db: sqlite3.Connection, value: seen.StepReport) -> None:
    row = (
        value.step,
        value.version_before,
        value.version_after,
        len(value.groups),
        value.num_executions,
        value.num_tokens,
        value.loss,
        value.grad_norm,
        value.mean_reward,
        int(value.is_applied),
        int(value.is_short),
        value.opened_s,
        value.closed_s,
        value.mean_shaped,
    )
    marks = ",".join("?" * len(row))
    db.execute(f"INSERT OR REPLACE INTO steps VALUES({marks})", row)
    db.executemany(
        "UPDATE groups SET consumed_step=? WHERE group_name=?",
        [(value.step, group) for group in value.groups],
    )


def _insert_eval(db: sqlite3.Connection, now_s: float, value: seen.EvalResult) -> None:
    rewards = [one for one in value.rewards if one is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    missing = len(value.rewards) - len(rewards)
    db.execute(
        "INSERT INTO evals VALUES(?,?,?,?,?,?,?)",
        (
            value.burst,
            value.version,
            mean,
            len(rewards),
            missing,
            value.later_token_share,
            now_s,
        ),
    )
