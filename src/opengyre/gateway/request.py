"""The gateway's neutral words: what every dialect is translated to and from.

Owns: messages, requests, answers in pieces, refusals. Must not know: HTTP, JSON, tokens.
Invariants: text is str (never None); a call's arguments stay the exact string they came as.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

Tool = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}` in all dialects."""


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call. `arguments` is the raw string: normally JSON, not necessarily."""

    call_id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """`calls` and `reasoning` only on assistant messages; `reasoning` is None when not sent.

    `reference`: the name of an attempt (see Dialect.form) whose answer this message stands for.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    reference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """None: the client did not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class ChoiceMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the answer must call a tool; `name` with NAMED."""

    mode: ChoiceMode = ChoiceMode.AUTO
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model call as its client meant it. `model` is echoed, never interpreted.

    `previous`: the name of an attempt (see Dialect.form) whose history and answer come before
    `messages`, but after the first of them if that `has_instructions`, which are not inherited.
    `is_parallel` False: the answer ends after its first call.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    choice: ToolChoice = field(default_factory=ToolChoice)
    is_parallel: bool = True
    is_stream: bool = False
    has_usage_event: bool = False
    has_logprobs: bool = False
    previous: str = ""
    has_instructions: bool = False

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """What the prompt shows: a model that must not call is shown no tools."""
        return () if self.choice.mode is ChoiceMode.NONE else self.tools


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """A call begins; `index` counts the calls of an answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """A part of a call's arguments as they were sampled."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """The call is complete; `call.arguments` are its pieces joined."""

    index: int
    call: Call


Piece = TextPiece | ReasoningPiece | CallStart | CallPiece | CallEnd


class Ending(StrEnum):
    """How an answer ends for its client."""

    STOP = "stop"
    LENGTH = "length"
    CALLS = "tool_calls"
    STOP_STRING = "stop_string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_reused_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token as text. `logprob` is natural, as the engine declares it."""

    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer: the message in whole, how it ended, what it used.

    `stop_string` is the one it came to, with STOP_STRING. `logprobs` only if they were asked for.
    """

    message: Message
    ending: Ending
    usage: Usage
    stop_string: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


class RefusalKind(StrEnum):
    INVALID = "invalid_request_error"
    UNAUTHORIZED = "authentication_error"
    NOT_FOUND = "not_found_error"
    TOO_MANY = "rate_limit_error"
    UNAVAILABLE = "service_unavailable"


_STATUS = {
    RefusalKind.INVALID: 400,
    RefusalKind.UNAUTHORIZED: 401,
    RefusalKind.NOT_FOUND: 404,
    RefusalKind.TOO_MANY: 429,
    RefusalKind.UNAVAILABLE: 503,
}


class Refusal(Exception):
    """The request is answered with an error in its dialect's shape, before any byte of an answer.

    `param` is the field at fault, `code` a stable word of the dialect; both may be "".
    """

    def __init__(
        self,
        message: str,
        *,
        kind: RefusalKind = RefusalKind.INVALID,
        code: str = "",
        param: str = "",
        status: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.status = status or _STATUS[kind]
