"""A session as it was, from the durable records of its turns.

Owns: reading records back into the tree. Must not know: files, HTTP. Invariants: a call that comes
next attaches as if the gateway had never died; what was not durable never happened; a record that
cannot be restored keeps its turn's number, and takes its own descendants with it and nothing else.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.gateway.body import decode_object
from opengyre.gateway.delta import restore_body
from opengyre.gateway.dialects.registry import DIALECTS
from opengyre.gateway.history import Keys, call_key
from opengyre.gateway.request import Message, Refusal, Request, Role
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Attempt, Incoming, Node, Place, full_ids
from opengyre.seams.errors import BoundaryError
from opengyre.seams.records import TokenRecord
from opengyre.trajectory.turns import ForkReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a session goes on from: how many turns earlier launches took, and the durable records
    of this launch in the order they were written. Whether the answers of the last
    `num_undelivered` of them reached their client, nobody knows."""

    first_turn: int = 0
    records: Sequence[TokenRecord] = ()
    num_undelivered: int = 0


NOTHING_EARLIER = Earlier()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredTurn:
    """One attempt as it was: what its client sent, the turn whose first ids begin its prompt, and
    the answer that its client got, of an abandoned one as far as it came."""

    request: Request
    parent: Node | None
    answer: Message


def restore_session(session: Session, earlier: Earlier) -> list[str]:
    """One line for each record that could not be restored."""
    tried = {(record.header.turn, record.header.attempt) for record in earlier.records}
    num_delivered = len(earlier.records) - earlier.num_undelivered
    session.num_turns = max(session.num_turns, earlier.first_turn)
    problems: list[str] = []
    for index, record in enumerate(earlier.records):
        header = record.header
        is_retried = (header.turn, header.attempt + 1) in tried
        is_retryable = not is_retried and (index >= num_delivered or not header.is_committed)
        try:
            restore_turn(session, record, is_retryable=is_retryable)
        except (BoundaryError, Refusal) as error:
            problems.append(f"{header.turn} attempt {header.attempt}: {error}")
    return problems


def restore_turn(
    session: Session, record: TokenRecord, *, is_retryable: bool = False
) -> RestoredTurn:
    """Put one attempt back. `is_retryable`: the same call is the next attempt of its turn.

    Raises BoundaryError if its parent or its body cannot be restored, Refusal if its request
    cannot be understood.
    """
    header = record.header
    number = int(header.turn.rpartition(".t")[2])
    session.num_turns = max(session.num_turns, number)
    parent = _parent(session, record)
    body = restore_body(record.request_delta, session.body(parent))
    raw = decode_object(body)
    dialect = DIALECTS.get(header.protocol)
    if dialect is None:
        raise _lost(f"its protocol {header.protocol} is not known")
    request = dialect.parse(raw)
    incoming = Incoming(
        request=request, raw=raw, body=body, protocol=header.protocol, role=header.role
    )
    attempt = Attempt(
        execution=session.execution,
        number=number,
        attempt=header.attempt,
        incoming=incoming.placed(),
        place=_place(session, record, incoming, parent),
    )
    answer = _answer(session, attempt, record)
    if header.is_committed:
        session.adopt(_node(attempt, record, answer), body=body)
        if is_retryable:
            session.expect_retry(attempt)
    else:
        session.abandon(attempt, record.completion_ids)
        if not is_retryable:
            session.take_retryable(attempt.place.call_key)
    return RestoredTurn(request=request, parent=parent, answer=answer)


def prompt_of(record: TokenRecord, parent: Node | None) -> list[int]:
    """Every id of the prompt that the engine was given."""
    kept = full_ids(parent)[: record.header.num_kept_tokens] if parent is not None else []
    return kept + record.new_prompt_ids


def _parent(session: Session, record: TokenRecord) -> Node | None:
    header = record.header
    parent = session.node(header.parent, header.parent_attempt)
    if header.parent and parent is None:
        raise _lost(f"its parent {header.parent} is not restored")
    num_there = parent.num_tokens if parent is not None else 0
    if header.num_kept_tokens > num_there:
        raise _lost(f"keeps {header.num_kept_tokens} tokens of a parent of {num_there}")
    return parent


def _place(session: Session, record: TokenRecord, incoming: Incoming, parent: Node | None) -> Place:
    """A committed turn's own prompt is not put together: nobody asks for it again."""
    header, request = record.header, incoming.request
    keys = Keys(request.offered_tools)
    history_key = _history_key(session, record, request, keys)
    return Place(
        parent=parent,
        fork_reason=ForkReason(header.fork_reason),
        prompt_ids=[] if header.is_committed else prompt_of(record, parent),
        num_kept=header.num_kept_tokens,
        forced_ids=session.forced(request),
        keys=keys,
        history_key=history_key,
        call_key=call_key(incoming.raw, history_key),
        delta=record.request_delta,
    )


def _history_key(session: Session, record: TokenRecord, request: Request, keys: Keys) -> bytes:
    """A turn that extends its parent adds the messages after the parent's answer."""
    parent = session.node(record.header.parent, record.header.parent_attempt)
    if parent is None or record.header.fork_reason:
        return keys.all(session.messages(request))[-1]
    own = request.messages
    start = int(request.has_instructions)
    answers = [k for k in range(start, len(own)) if own[k].role is Role.ASSISTANT]
    key = parent.key
    for message in own[answers[-1] + 1 if answers else start :]:
        key = keys.next(key, message)
    return key


def _answer(session: Session, attempt: Attempt, record: TokenRecord) -> Message:
    parser = session.parser(attempt)
    parser.feed_all(record.completion_ids)
    parser.finish()
    return parser.message()


def _node(attempt: Attempt, record: TokenRecord, answer: Message) -> Node:
    place = attempt.place
    return Node(
        turn=attempt.turn,
        attempt=attempt.attempt,
        key=place.keys.next(place.history_key, answer),
        protocol=attempt.incoming.protocol,
        parent=place.parent,
        num_kept=place.num_kept,
        new_ids=array("i", record.new_prompt_ids),
        completion=array("i", record.completion_ids),
        message=answer,
        delta=record.request_delta,
        asked=attempt.incoming.asked,
    )


def _lost(reason: str) -> BoundaryError:
    return BoundaryError("tokens", reason, retryable=False)
