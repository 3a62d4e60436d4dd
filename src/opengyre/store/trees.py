"""From token records to the pure tree of an execution's turns.

Must not know: what becomes of a tree. Invariant: nothing is dropped in translation.
"""

from collections.abc import Iterable

from opengyre.seams.records import TokenRecord
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import (
    BrokenRecordError,
    ForkReason,
    Role,
    SampledSpan,
    TurnTokens,
)


def tree_of(records: Iterable[TokenRecord], *, given_up: Iterable[TokenRecord] = ()) -> Tree:
    """`records` of the present launch in the order in which they were made, after those of
    launches that were `given_up`. Raises BrokenRecordError."""
    tree = Tree()
    for record in given_up:
        tree.insert(turn_tokens(record, launch=1))
    launch = 2 if tree.nodes else 1
    for record in records:
        tree.insert(turn_tokens(record, launch=launch))
    tree.launch = launch
    return tree


def turn_tokens(record: TokenRecord, *, launch: int = 1) -> TurnTokens:
    """The pure form of one record. Raises BrokenRecordError for a word that is not known."""
    header = record.header
    try:
        role, fork_reason = Role(header.role), ForkReason(header.fork_reason)
    except ValueError as error:
        raise BrokenRecordError(f"{header.turn}: {error}") from error
    return TurnTokens(
        turn=header.turn,
        attempt=header.attempt,
        parent=header.parent,
        parent_attempt=header.parent_attempt,
        fork_reason=fork_reason,
        role=role,
        is_committed=header.is_committed,
        num_kept_tokens=header.num_kept_tokens,
        new_prompt_ids=record.new_prompt_ids,
        completion_ids=record.completion_ids,
        logprobs=record.logprobs,
        spans=tuple(
            SampledSpan(
                start=span.start, end=span.end, version=span.policy_version, engine=span.engine
            )
            for span in header.spans
        ),
        launch=launch,
    )
