"""A session as it was, from the durable records of its turns.

Owns: reading records back into the tree. Must not know: files, HTTP. Invariant: a call that comes
next attaches as if the gateway had never died; what was not durable never happened.
"""

from collections.abc import Sequence

from opengyre.gateway.body import decode_object, digest, restore_body
from opengyre.gateway.dialects.registry import DIALECTS
from opengyre.gateway.sessions import Attempt, Incoming, Session
from opengyre.seams.records import TokenRecord


def restore_session(session: Session, records: Sequence[TokenRecord]) -> None:
    """`records` in the order they were written, of this session only."""
    for record in records:
        attempt = _attempt(session, record)
        session.num_turns = max(session.num_turns, attempt.number)
        if not record.header.is_committed:
            session.abandon(attempt, record.completion_ids)
            continue
        parser = session.parser(attempt)
        for token in record.completion_ids:
            parser.feed(token)
        parser.finish()
        session.commit(attempt, completion_ids=record.completion_ids, message=parser.message())


def _attempt(session: Session, record: TokenRecord) -> Attempt:
    header = record.header
    body = restore_body(record.request_delta, session.body_of(header.parent))
    raw = decode_object(body)
    incoming = Incoming(
        request=DIALECTS[header.protocol].parse(raw),
        raw=raw,
        body=body,
        key=digest(raw),
        protocol=header.protocol,
        role=header.role,
    )
    return Attempt(
        execution=session.execution,
        number=int(header.turn.rpartition(".t")[2]),
        attempt=header.attempt,
        incoming=incoming.placed(),
        place=session.place_recorded(incoming, record),
    )
