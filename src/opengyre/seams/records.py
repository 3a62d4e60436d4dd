"""What the gateway records of a turn, as it travels to the controller and into the run folder.

A turn's prompt restores as: the first `num_kept_tokens` ids of the parent turn's (prompt +
completion), then the new ids stored in its own segment record. Invariant: completion ids,
logprobs and spans have the same length in tokens.
"""

import msgspec


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Completion tokens [start, end) sampled by `engine` under `policy_version`."""

    start: int
    end: int
    policy_version: int
    engine: str


class SegmentRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a token record lies: file number, byte offset of the record, and its crc32."""

    segment: int
    offset_bytes: int
    crc32: int


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One committed or abandoned model call of an execution; ids are in the segment record.

    `turn` like "e000123.t7"; `parent` another turn of the execution or "" at a root, of which
    `parent_attempt` is meant (None: the one that stands); `fork_reason` "" when it extends it.
    `is_committed` is True once its terminal event was written to the client. `finish`: stop,
    length, cancelled, error. `role` as the wire told it: main, main-summary, sub-agent,
    sub-agent-summary, side. `protocol` is the dialect of its body; `logprob_mode` the engine's
    (see EngineCaps), `top_k` 0 and `min_p` 0 keep all. Each call that its answer began and ended is
    in `num_calls`, or in `num_malformed_calls` if it has no name or its arguments are no JSON
    object; `num_watched_calls` of `num_calls` have arguments that match `reward.watched_pattern`.
    """

    turn: str
    execution: str
    attempt: int
    parent: str
    parent_attempt: int | None = None
    fork_reason: str
    role: str
    num_kept_tokens: int
    num_new_prompt_tokens: int
    num_completion_tokens: int
    spans: list[Span]
    finish: str
    is_committed: bool
    ref: SegmentRef
    received_s: float
    first_token_s: float
    ended_s: float
    held_s: float
    num_continuations: int
    protocol: str = "openai-chat"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logprob_mode: str = ""
    num_calls: int = 0
    num_malformed_calls: int = 0
    num_watched_calls: int = 0


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a segment record, restored: new prompt ids and the completion."""

    header: TurnRecord
    new_prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    request_delta: bytes
