"""Every recorded attempt of every turn as a row, from segment bytes and what `run.db` tells.

Owns: putting a row together. Must not know: output formats, the CLI, where records lie. Invariants:
each whole record gives one row, executions in the order of their first record and records in the
order they were written; memory is bounded by one execution; what cannot be restored is told, and
costs nothing but itself and the prompts that begin with it.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from opengyre.gateway.request import Message, Refusal, Role
from opengyre.gateway.restoring import prompt_of, restore_turn
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Node
from opengyre.runtime.book import turn_number
from opengyre.runtime.exporting.recorded import Recorded
from opengyre.runtime.exporting.row import ExportedMessage, TokenRange, TurnRow, exported_message
from opengyre.runtime.exporting.trained import Nodes, trained_ranges
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.records import TokenRecord, TurnRecord
from opengyre.store.outcomes import ExecutionOutcome
from opengyre.store.segments import SegmentReader
from opengyre.trajectory.account import Reason

_ANY_CONTEXT = 2**31
_NOT_TOLD = ExecutionOutcome(execution="")
_NO_MESSAGE = Message(role=Role.ASSISTANT)
_json = msgspec.json.Encoder()


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
    nodes = _id_tree(records)
    ranges = trained_ranges(recorded.trained.get(name, ()), nodes)
    session = Session(execution=name, renderer=recorded.renderer, max_context_tokens=_ANY_CONTEXT)
    for record in records:
        header = record.header
        is_standing = header.is_committed and standing[header.turn] == header.attempt
        trained = ranges.get(header.turn, []) if is_standing else []
        marks = _Marks(
            reason=_not_trainable(header, standing, outcome, recorded.trained_roles),
            trained=[TokenRange(start=a, end=b) for a, b in trained] if recorded.has_run else None,
        )
        yield _row(record, _content(session, record, nodes), marks=marks, outcome=outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    reason: str
    trained: list[TokenRange] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What of a row is restored; None where it cannot be, and why."""

    prompt_ids: list[int] | None
    messages: list[ExportedMessage] | None = None
    tools: str | None = None
    answer: ExportedMessage | None = None
    problem: str = ""


def _id_tree(records: Sequence[TokenRecord]) -> Nodes:
    """Committed attempts, their ids alone: these come back even where a body does not. The one
    that stands for its turn also has the attempt None."""
    nodes: Nodes = {}
    for record in records:
        header = record.header
        parent = nodes.get((header.parent, header.parent_attempt))
        if header.is_committed and not (header.parent and parent is None):
            node = Node(
                turn=header.turn,
                attempt=header.attempt,
                key=b"",
                protocol=header.protocol,
                parent=parent,
                num_kept=header.num_kept_tokens,
                new_ids=array("i", record.new_prompt_ids),
                completion=array("i", record.completion_ids),
                message=_NO_MESSAGE,
                delta=b"",
            )
            nodes[header.turn, None] = nodes[header.turn, header.attempt] = node
    return nodes


def _content(session: Session, record: TokenRecord, nodes: Nodes) -> _Content:
    parent = nodes.get((record.header.parent, record.header.parent_attempt))
    is_whole = parent is not None or not record.header.parent
    prompt_ids = prompt_of(record, parent) if is_whole else None
    try:
        turn = restore_turn(session, record)
        history = session.messages(turn.request)
    except (BoundaryError, Refusal) as error:
        return _Content(prompt_ids=prompt_ids, problem=str(error))
    return _Content(
        prompt_ids=prompt_ids,
        messages=[exported_message(message) for message in history],
        tools=_json.encode(turn.request.tools).decode(),
        answer=exported_message(turn.answer),
    )


def _row(
    record: TokenRecord, content: _Content, *, marks: _Marks, outcome: ExecutionOutcome
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
        is_trainable=not marks.reason,
        not_trainable=marks.reason,
        trained=marks.trained,
        dispatch_version=outcome.version,
        outcome=outcome.outcome,
        reward=outcome.reward,
        verdict_reason=outcome.verdict_reason,
        step=outcome.step,
        received_s=header.received_s,
        first_token_s=header.first_token_s or None,
        ended_s=header.ended_s,
        logprob_mode=header.logprob_mode,
        temperature=header.temperature,
        top_p=header.top_p,
        top_k=header.top_k,
        min_p=header.min_p,
        held_s=header.held_s,
        num_continuations=header.num_continuations,
        num_calls=header.num_calls,
        num_malformed_calls=header.num_malformed_calls,
        num_watched_calls=header.num_watched_calls,
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
    trained_roles: Sequence[str],
) -> str:
    """Why no token of this attempt is one to train; "" if some are, as far as is known."""
    if turn_number(header.turn) <= outcome.num_dropped_turns:
        return Reason.RELAUNCHED
    if not header.is_committed:
        return Reason.NOT_COMMITTED
    if standing[header.turn] != header.attempt:
        return Reason.SUPERSEDED_ATTEMPT
    if header.role not in trained_roles:
        return Reason.UNTRAINED_ROLE
    if outcome.is_evaluation:
        return Reason.EVALUATION
    if outcome.outcome is not None and outcome.reward is None:
        return Reason.NO_VERDICT
    return outcome.exclusion.partition(":")[0]
