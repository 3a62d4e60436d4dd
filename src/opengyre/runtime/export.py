"""Every recorded attempt of every turn as a row, from segment bytes and what `run.db` tells.

Owns: finding the records of a folder, putting a row together. Must not know: output formats, the
CLI. Invariants: each whole record gives one row, executions in the order of their first record and
records in the order they were written; memory is bounded by one execution; damage is told, and
hides nothing but itself and the prompts that begin with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opengyre.gateway.rendering import ModelRenderer, load_renderer
from opengyre.gateway.request import Refusal
from opengyre.gateway.restoring import prompt_of, restore_turn
from opengyre.gateway.sessions import Session
from opengyre.runtime.book import turn_number
from opengyre.runtime.export_row import ExportedMessage, TurnRow, exported_message
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord
from opengyre.store.outcomes import ExecutionOutcome, read_outcomes
from opengyre.store.run_folder import RunFolder, read_json
from opengyre.store.segments import Damage, SegmentReader, segment_numbers
from opengyre.trajectory.rows import UNTRAINED_ROLES, Reason

RELAUNCHED = "relaunched"
EVALUATION = "evaluation"
_ANY_CONTEXT = 2**31
_NOT_TOLD = ExecutionOutcome(execution="")
_json = msgspec.json.Encoder()


@dataclass(slots=True, kw_only=True)
class ExportTotals:
    """What was exported, and a line for everything that could not be."""

    num_rows: int = 0
    num_executions: int = 0
    problems: list[str] = field(default_factory=list)
    num_unfinished: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run folder, or that of a gateway on its own."""

    tokens: Path
    renderer: ModelRenderer
    outcomes: dict[str, ExecutionOutcome]
    untrained_roles: Sequence[str]
    refs: dict[str, list[SegmentRef]]
    totals: ExportTotals


def open_recorded(folder: Path, *, model: Path | None = None) -> Recorded:
    """Find every record. `model`: where the model's tokenizer is now, if not where it was.

    Raises ConfigError if `folder` holds no records, or the tokenizer is not there.
    """
    run = RunFolder(folder)
    if not run.tokens.is_dir():
        raise ConfigError(f"{folder}: no records in it (a run or a gateway makes tokens/*.seg)")
    config = read_json(run.config_json)
    renderer = load_renderer(model or _model_of(run, config), allow_rerender=True)
    outcomes = read_outcomes(run.db) if run.db.exists() else {}
    totals = ExportTotals()
    return Recorded(
        tokens=run.tokens,
        renderer=renderer,
        outcomes=outcomes,
        untrained_roles=config.get("training", {}).get("untrained_roles", UNTRAINED_ROLES),
        refs=_find_records(run.tokens, totals),
        totals=totals,
    )


def rows_of(recorded: Recorded, *, execution: str = "") -> Iterator[TurnRow]:
    """Rows of all executions, or of one. Raises ConfigError if there is no such execution."""
    if execution and execution not in recorded.refs:
        raise ConfigError(f"{execution}: no turn of it is recorded")
    for name in [execution] if execution else list(recorded.refs):
        recorded.totals.num_executions += 1
        for row in _execution_rows(recorded, name):
            recorded.totals.num_rows += 1
            if row.problem:
                what = f"{row.turn} attempt {row.attempt}: {row.problem}"
                recorded.totals.problems.append(what)
            yield row


def _execution_rows(recorded: Recorded, name: str) -> Iterator[TurnRow]:
    reader = SegmentReader(recorded.tokens)
    records = [reader.read(ref) for ref in recorded.refs[name]]
    outcome = recorded.outcomes.get(name, _NOT_TOLD)
    standing = _standing_attempts([record.header for record in records])
    session = Session(execution=name, renderer=recorded.renderer, max_context_tokens=_ANY_CONTEXT)
    for record in records:
        content = _content(session, record)
        reason = _not_trainable(record.header, standing, outcome, recorded.untrained_roles)
        yield _row(record, content, reason=reason, outcome=outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What of a row is restored; None where it cannot be, and why."""

    messages: list[ExportedMessage] | None = None
    tools: str | None = None
    answer: ExportedMessage | None = None
    prompt_ids: list[int] | None = None
    problem: str = ""


def _content(session: Session, record: TokenRecord) -> _Content:
    try:
        turn = restore_turn(session, record)
        history = session.messages(turn.request)
    except (BoundaryError, Refusal) as error:
        return _Content(problem=str(error))
    return _Content(
        messages=[exported_message(message) for message in history],
        tools=_json.encode(turn.request.tools).decode(),
        answer=exported_message(turn.answer),
        prompt_ids=prompt_of(record, turn.parent),
    )


def _row(
    record: TokenRecord, content: _Content, *, reason: str, outcome: ExecutionOutcome
) -> TurnRow:
    header = record.header
    return TurnRow(
        execution=header.execution,
        group=outcome.group,
        task=outcome.task,
        turn=header.turn,
        attempt=header.attempt,
        parent=header.parent,
        fork_reason=header.fork_reason,
        role=header.role,
        protocol=header.protocol,
        is_committed=header.is_committed,
        finish=header.finish,
        messages=content.messages,
        tools=content.tools,
        answer=content.answer,
        num_kept_tokens=header.num_kept_tokens,
        prompt_ids=content.prompt_ids,
        completion_ids=record.completion_ids,
        logprobs=record.logprobs,
        spans=header.spans,
        is_trainable=not reason,
        not_trainable=reason,
        dispatch_version=outcome.version,
        outcome=outcome.outcome,
        reward=outcome.reward,
        verdict_reason=outcome.verdict_reason,
        step=outcome.step,
        received_s=header.received_s,
        first_token_s=header.first_token_s or None,
        ended_s=header.ended_s,
        held_s=header.held_s,
        num_continuations=header.num_continuations,
        segment=header.ref.segment,
        offset_bytes=header.ref.offset_bytes,
        problem=content.problem,
    )


def _standing_attempts(headers: Sequence[TurnRecord]) -> dict[str, int]:
    """The attempt that counts of each turn: the last committed one, else the last."""
    standing: dict[str, TurnRecord] = {}
    for header in headers:
        before = standing.get(header.turn)
        if before is None or header.is_committed or not before.is_committed:
            standing[header.turn] = header
    return {turn: header.attempt for turn, header in standing.items()}


def _not_trainable(
    header: TurnRecord,
    standing: dict[str, int],
    outcome: ExecutionOutcome,
    untrained_roles: Sequence[str],
) -> str:
    """Why no token of this attempt is one to train; "" if some are, as far as is known."""
    if not header.is_committed:
        return Reason.NOT_COMMITTED
    if standing[header.turn] != header.attempt:
        return Reason.SUPERSEDED_ATTEMPT
    if turn_number(header.turn) <= outcome.num_dropped_turns:
        return RELAUNCHED
    if header.role in untrained_roles:
        return Reason.UNTRAINED_ROLE
    if outcome.is_evaluation:
        return EVALUATION
    if outcome.outcome is not None and outcome.reward is None:
        return Reason.NO_VERDICT
    return ""


def _find_records(tokens: Path, totals: ExportTotals) -> dict[str, list[SegmentRef]]:
    """Where the records of each execution lie, in the order they were written."""
    refs: dict[str, list[SegmentRef]] = {}

    def on_damage(damage: Damage) -> None:
        totals.num_unfinished += damage.is_at_end
        if not damage.is_at_end:
            totals.problems.append(str(damage))

    reader = SegmentReader(tokens)
    for segment in segment_numbers(tokens):
        for record in reader.scan(segment, on_damage=on_damage):
            refs.setdefault(record.header.execution, []).append(record.header.ref)
    return refs


def _model_of(run: RunFolder, config: dict[str, Any]) -> Path:
    """What config.json names: `model.path` of a run, `model` of a gateway on its own."""
    model = config.get("model")
    path = model.get("path") if isinstance(model, dict) else model
    if not isinstance(path, str):
        raise ConfigError(f"{run.config_json}: names no model; say --model FOLDER")
    if not Path(path).is_dir():
        raise ConfigError(f"{path}: the model that was recorded is not there; say --model FOLDER")
    return Path(path)
