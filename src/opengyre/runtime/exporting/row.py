"""The exported row of one attempt of a turn: its columns are documented in docs/records.md.

Must not know: files, how a record is restored. Invariant: a column is added with a new SCHEMA;
none changes its meaning within one.
"""

import msgspec

from opengyre.gateway.request import Message
from opengyre.seams.records import Span

SCHEMA = 2


class ExportedCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the string as it was sent or sampled: normally JSON."""

    id: str
    name: str
    arguments: str


class ExportedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of any protocol in one shape; `reasoning` is null where none was sent."""

    role: str
    content: str
    reasoning: str | None
    tool_calls: list[ExportedCall]
    tool_call_id: str


class TokenRange(msgspec.Struct, frozen=True, kw_only=True):
    """[start, end) of the completion ids."""

    start: int
    end: int


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """See docs/records.md. What cannot be restored is null, and `problem` says why."""

    schema: int = SCHEMA
    execution: str
    group: str
    task: str
    turn: str
    attempt: int
    parent: str
    fork_reason: str
    role: str
    protocol: str
    is_committed: bool
    finish: str
    messages: list[ExportedMessage] | None
    tools: str | None
    answer: ExportedMessage | None
    num_kept_tokens: int
    prompt_ids: list[int] | None
    completion_ids: list[int]
    logprobs: list[float]
    logprob_mode: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    spans: list[Span]
    is_trainable: bool
    not_trainable: str
    trained: list[TokenRange] | None
    dispatch_version: int | None
    outcome: str | None
    reward: float | None
    verdict_reason: str | None
    step: int | None
    received_s: float
    first_token_s: float | None
    ended_s: float
    held_s: float
    num_continuations: int
    num_calls: int
    num_malformed_calls: int
    num_watched_calls: int
    segment: int
    offset_bytes: int
    problem: str


def exported_message(message: Message) -> ExportedMessage:
    return ExportedMessage(
        role=message.role.value,
        content=message.text,
        reasoning=message.reasoning,
        tool_calls=[
            ExportedCall(id=call.call_id, name=call.name, arguments=call.arguments)
            for call in message.calls
        ],
        tool_call_id=message.call_id,
    )
