"""One execution's turns as a tree of tokens: where a request attaches, what is new in it.

Owns: matching, forks, retries, turn numbers. Must not know: HTTP, engines, time. Invariants:
along a branch a prompt begins with exactly its parent's prompt + completion; a rewritten history
forks with a reason and drops nothing; memory grows with what is new; a retry is the same turn with
a later attempt, and only an attempt whose terminal event was not written can be retried.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from opengyre.gateway.body import body_delta, restore_body
from opengyre.gateway.history import (
    history_keys,
    is_same_call,
    is_same_reasoning,
    next_key,
)
from opengyre.gateway.rendering import ModelRenderer
from opengyre.gateway.request import Call, Message, Refusal, Request, Role

_NUM_KEPT_BODIES = 2


class ForkReason(StrEnum):
    NONE = ""
    NEW_ROOT = "new root: no known turn is in its history"
    REWRITTEN_TURN = "an assistant message after the known history is not ours"
    REWRITTEN_REASONING = "reasoning was rewritten"
    NO_BRIDGE = "the chat format cannot be extended by these messages"


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A turn whose terminal event was written. Ids are stored once: see `full_ids`."""

    turn: str
    parent: "Node | None"
    num_kept: int
    new_ids: "array[int]"
    completion: "array[int]"
    message: Message
    delta: bytes

    @property
    def num_tokens(self) -> int:
        return self.num_kept + len(self.new_ids) + len(self.completion)


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One admitted call. `end` is the node it attaches to; `keys[-1]` its whole history."""

    turn: str
    number: int
    attempt: int
    request: Request
    body: bytes
    body_key: bytes
    parent: Node | None
    fork_reason: ForkReason
    prompt_ids: list[int]
    num_kept: int
    history_key: bytes
    delta: bytes
    is_abandoned: bool = False


@dataclass(slots=True, kw_only=True)
class Session:
    """`execution`'s turns. `admit` and `commit`/`abandon` are synchronous: no half states."""

    execution: str
    renderer: ModelRenderer
    max_context_tokens: int
    num_turns: int = 0
    _nodes_by_key: dict[bytes, list[Node]] = field(default_factory=dict)
    _calls_by_id: dict[str, Call] = field(default_factory=dict)
    _retryable: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)
    _bodies: dict[str, bytes] = field(default_factory=dict)
    _latest: Node | None = None

    def admit(self, request: Request, *, body: bytes, body_key: bytes) -> Attempt:
        """Give the request its turn, parent and prompt.

        Raises Refusal (context_length_exceeded) when the prompt leaves no room for an answer.
        """
        keys = history_keys(request.messages, request.tools)
        parent, prompt_ids, reason = self._attach(request, keys)
        self._check_room(len(prompt_ids))
        num_kept = _num_kept(parent, prompt_ids, is_extended=reason is ForkReason.NONE)
        parent = _holder(parent, num_kept)
        retried = self._take_retryable(body_key)
        if retried is None:
            self.num_turns += 1
        number, attempt = retried or (self.num_turns, 0)
        return Attempt(
            turn=f"{self.execution}.t{number}",
            number=number,
            attempt=attempt,
            request=request,
            body=body,
            body_key=body_key,
            parent=parent,
            fork_reason=reason,
            prompt_ids=prompt_ids,
            num_kept=num_kept,
            history_key=keys[-1],
            delta=body_delta(body, self._body(parent)),
        )

    def commit(self, attempt: Attempt, *, completion_ids: Sequence[int], message: Message) -> Node:
        """The terminal event was written: the turn is part of the tree from now on."""
        node = Node(
            turn=attempt.turn,
            parent=attempt.parent,
            num_kept=attempt.num_kept,
            new_ids=array("i", attempt.prompt_ids[attempt.num_kept :]),
            completion=array("i", completion_ids),
            message=message,
            delta=attempt.delta,
        )
        key = next_key(attempt.history_key, message)
        self._nodes_by_key.setdefault(key, []).append(node)
        self._calls_by_id.update({call.call_id: call for call in message.calls})
        self._remember_body(attempt)
        self._latest = node
        return node

    def abandon(self, attempt: Attempt) -> None:
        """Its terminal event will never be written: the same body is a retry of it. Idempotent."""
        if attempt.is_abandoned:
            return
        attempt.is_abandoned = True
        following = (attempt.number, attempt.attempt + 1)
        self._retryable.setdefault(attempt.body_key, []).append(following)

    def _attach(
        self, request: Request, keys: list[bytes]
    ) -> tuple[Node | None, list[int], ForkReason]:
        messages = request.messages
        node, num_matched, reason = self._longest_match(messages, keys)
        if node is not None and not reason:
            extended = self._extend(node, messages[num_matched:])
            if extended is not None:
                return node, extended, ForkReason.NONE
            is_rewritten = any(m.role is Role.ASSISTANT for m in messages[num_matched:])
            reason = ForkReason.REWRITTEN_TURN if is_rewritten else ForkReason.NO_BRIDGE
        if self._latest is None:
            reason = ForkReason.NONE
        restored = [self._restored(message) for message in messages]
        return node or self._latest, self.renderer.root(restored, request.tools), reason

    def _longest_match(
        self, messages: Sequence[Message], keys: list[bytes]
    ) -> tuple[Node | None, int, ForkReason]:
        for k in range(len(messages), 0, -1):
            if messages[k - 1].role is not Role.ASSISTANT:
                continue
            nodes = self._nodes_by_key.get(keys[k])
            if nodes:
                node = _best(nodes, messages[k - 1])
                is_same = is_same_reasoning(messages[k - 1].reasoning, node.message.reasoning)
                reason = ForkReason.NONE if is_same else ForkReason.REWRITTEN_REASONING
                return node, k, reason
        has_foreign = any(message.role is Role.ASSISTANT for message in messages)
        reason = ForkReason.REWRITTEN_TURN if has_foreign else ForkReason.NEW_ROOT
        return None, 0, reason

    def _extend(self, node: Node, new_messages: Sequence[Message]) -> list[int] | None:
        if not new_messages or any(m.role is Role.ASSISTANT for m in new_messages):
            return None
        before = full_ids(node)
        split = len(before) - len(node.completion)
        extended = self.renderer.extend(before[:split], before[split:], new_messages)
        is_exact = extended is not None and extended[: len(before)] == before
        return extended if is_exact else None

    def _restored(self, message: Message) -> Message:
        """Calls of ours that came back equal in value, as they were sampled."""
        calls = tuple(self._restored_call(call) for call in message.calls)
        return replace(message, calls=calls) if message.calls else message

    def _restored_call(self, call: Call) -> Call:
        ours = self._calls_by_id.get(call.call_id)
        return ours if ours is not None and is_same_call(ours, call) else call

    def _take_retryable(self, body_key: bytes) -> tuple[int, int] | None:
        """(turn, attempt) of a request that repeats an abandoned one."""
        waiting = self._retryable.get(body_key)
        if not waiting:
            return None
        following = waiting.pop()
        if not waiting:
            del self._retryable[body_key]
        return following

    def _check_room(self, num_prompt: int) -> None:
        if num_prompt >= self.max_context_tokens:
            raise Refusal(
                f"This model's maximum context length is {self.max_context_tokens} tokens. "
                f"However, your messages resulted in {num_prompt} tokens. "
                "Please reduce the length of the messages.",
                code="context_length_exceeded",
                param="messages",
            )

    def _remember_body(self, attempt: Attempt) -> None:
        self._bodies[attempt.turn] = attempt.body
        while len(self._bodies) > _NUM_KEPT_BODIES:
            del self._bodies[next(iter(self._bodies))]

    def _body(self, node: Node | None) -> bytes:
        """The raw body of a turn, from its deltas if it is not among the newest."""
        deltas: list[bytes] = []
        while node is not None and node.turn not in self._bodies:
            deltas.append(node.delta)
            node = node.parent
        body = b"" if node is None else self._bodies[node.turn]
        for delta in reversed(deltas):
            body = restore_body(delta, body)
        return body


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


def _holder(node: Node | None, num_kept: int) -> Node | None:
    """The highest turn above `node` that holds its first `num_kept` ids: chains stay short."""
    while node is not None and num_kept <= node.num_kept:
        node = node.parent
    return node if num_kept else None


def _best(nodes: list[Node], message: Message) -> Node:
    """Among turns with the same history: the one whose call ids these are, else the newest."""
    ids = [call.call_id for call in message.calls]
    for node in reversed(nodes):
        if ids and [call.call_id for call in node.message.calls] == ids:
            return node
    return nodes[-1]


def _num_kept(parent: Node | None, prompt_ids: list[int], *, is_extended: bool) -> int:
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
