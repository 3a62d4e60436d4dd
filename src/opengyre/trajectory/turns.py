"""What the processor is told of an execution's model calls, in one closed vocabulary.

Owns: roles, reasons of the matcher, one attempt's tokens. Must not know where records are stored.
Invariant: completion ids and logprobs have one length, and spans cover it without a hole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What kind of call it was, as the wire told it."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    SIDE = "side"


TRAINED_ROLES = (Role.MAIN, Role.MAIN_SUMMARY, Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY)


class ForkReason(StrEnum):
    """Why a call does not simply go on from its parent's answer, as the gateway saw it."""

    NONE = ""
    NEW_ROOT = "new_root"
    REWRITTEN_TURN = "rewritten_turn"
    REWRITTEN_REASONING = "rewritten_reasoning"
    NO_BRIDGE = "no_bridge"
    KEPT_PARTS = "kept_parts"


class BrokenRecordError(ValueError):
    """The turns of an execution contradict each other; the text names the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """Completion tokens [start, end) were sampled by `engine` under `version`."""

    start: int
    end: int
    version: int
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """One attempt of a turn.

    `parent` is a turn id or "", `parent_attempt` the attempt of it (None: the one that stands); the
    prompt is the first `num_kept_tokens` ids of the parent's prompt + completion, then
    `new_prompt_ids`. `launch` counts from 1: an execution that was launched again goes on with
    turn numbers, not with tokens.
    """

    turn: str
    attempt: int
    parent: str
    fork_reason: ForkReason
    role: Role
    is_committed: bool
    num_kept_tokens: int
    new_prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: tuple[SampledSpan, ...]
    parent_attempt: int | None = None
    launch: int = 1
