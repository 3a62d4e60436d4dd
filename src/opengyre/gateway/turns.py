"""What a session's turns are: a call as it came, where it attaches, what became of it.

Must not know: how a parent is found. Invariants: ids are stored once, in the turn that was first
to have them; what is kept for long has neither a prompt nor a body of its own.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from opengyre.gateway.history import Keys
from opengyre.gateway.request import Message, Request, Tool
from opengyre.trajectory.turns import ForkReason


def attempt_name(turn: str, attempt: int) -> str:
    return f"{turn}.a{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One call as it came: `body` are its bytes, `raw` what they say; `role` as the wire tells it,
    `protocol` the dialect's name."""

    request: Request
    raw: dict[str, Any]
    body: bytes
    protocol: str
    role: str = "main"

    @property
    def asked(self) -> Request | None:
        """A request that names what came before, which its body alone does not say."""
        return self.request if self.request.previous else None

    def placed(self) -> "Incoming":
        """What is still needed of it once its prompt is known: a long history is let go."""
        request = self.asked or replace(self.request, messages=())
        return replace(self, request=request, raw={})


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A turn whose terminal event was written. Ids are stored once: see `full_ids`. `key` is that
    of its history with its answer."""

    turn: str
    attempt: int = 0
    key: bytes
    protocol: str
    parent: "Node | None"
    num_kept: int
    new_ids: "array[int]"
    completion: "array[int]"
    message: Message
    delta: bytes
    asked: Request | None = None

    @property
    def name(self) -> str:
        return attempt_name(self.turn, self.attempt)

    @property
    def num_tokens(self) -> int:
        return self.num_kept + len(self.new_ids) + len(self.completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a call attaches: the first `num_kept` of `prompt_ids` are `parent`'s, the last ones
    are `forced_ids`, the beginning of the answer. `history_key` is that of its whole history,
    `call_key` that of all it says, `delta` its body against the parent's."""

    parent: Node | None
    fork_reason: ForkReason
    prompt_ids: list[int]
    num_kept: int
    forced_ids: list[int]
    keys: Keys
    history_key: bytes
    call_key: bytes
    delta: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One admitted call: the `attempt`-th try, from 0, of the `number`-th turn."""

    execution: str
    number: int
    attempt: int
    incoming: Incoming
    place: Place
    is_abandoned: bool = False

    @property
    def turn(self) -> str:
        return f"{self.execution}.t{self.number}"

    @property
    def name(self) -> str:
        """Of this attempt among all of the run; ids of answers and calls are made of it."""
        return attempt_name(self.turn, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What was sampled of an answer whose end never came."""

    attempt: Attempt
    new_ids: "array[int]"
    completion: "array[int]"

    @classmethod
    def of(cls, attempt: Attempt, completion_ids: Sequence[int]) -> Self:
        """Without the attempt's body and prompt, which would be kept for long."""
        place = attempt.place
        return cls(
            attempt=replace(
                attempt,
                incoming=replace(attempt.incoming, body=b""),
                place=replace(place, prompt_ids=[]),
            ),
            new_ids=array("i", place.prompt_ids[place.num_kept :]),
            completion=array("i", completion_ids),
        )

    def prompt_ids(self) -> list[int]:
        parent, num_kept = self.attempt.place.parent, self.attempt.place.num_kept
        kept = full_ids(parent)[:num_kept] if parent is not None else []
        return kept + self.new_ids.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The messages of a call after its tools; key k of `so_far` is that of the first k."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    keys: Keys
    so_far: list[bytes]

    @classmethod
    def of(cls, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Self:
        keys = Keys(tools)
        return cls(messages=messages, tools=tools, keys=keys, so_far=keys.all(messages))


def full_ids(node: Node) -> list[int]:
    """Prompt + completion of a turn."""
    parts: list[list[int]] = []
    wanted = node.num_tokens
    at: Node | None = node
    while at is not None:
        own = at.new_ids.tolist() + at.completion.tolist()
        parts.append(own[: max(0, wanted - at.num_kept)])
        wanted = min(wanted, at.num_kept)
        at = at.parent
    ids: list[int] = []
    for part in reversed(parts):
        ids += part
    return ids


def holder(node: Node | None, num_kept: int) -> Node | None:
    """The highest turn above `node` that holds its first `num_kept` ids: chains stay short."""
    while node is not None and num_kept <= node.num_kept:
        node = node.parent
    return node if num_kept else None


def num_kept_of(parent: Node | None, prompt_ids: list[int], *, is_extended: bool) -> int:
    """How many ids of `parent` the prompt begins with; all of them if it extends it."""
    if parent is None:
        return 0
    return parent.num_tokens if is_extended else _num_common(prompt_ids, full_ids(parent))


def _num_common(one: list[int], other: list[int]) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
