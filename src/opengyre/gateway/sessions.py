"""One execution's turns as a tree of tokens: where a request attaches, what is new in it.

Owns: matching, forks, retries, turn numbers. Must not know: HTTP, engines, time. Invariants:
along a branch a prompt begins with exactly its parent's prompt + completion; a rewritten history
forks with a reason and drops nothing; memory grows with what is new; a retry is the same turn with
a later attempt, and only an attempt whose terminal event was not written can be retried. `place`
only reads, so that a long prompt can be encoded in another thread; all else is quick.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec

from opengyre.gateway.body import decode_object
from opengyre.gateway.delta import body_delta, restore_body
from opengyre.gateway.dialects.registry import DIALECTS
from opengyre.gateway.history import Keys, call_key, is_same_reasoning
from opengyre.gateway.rendering.output import AnswerParser
from opengyre.gateway.rendering.renderer import ModelRenderer
from opengyre.gateway.rendering.tokenizer import TooManyIdsError
from opengyre.gateway.request import Call, ChoiceMode, Message, Refusal, Request, Role, Tool
from opengyre.gateway.turns import (
    Attempt,
    Cut,
    History,
    Incoming,
    Node,
    Place,
    attempt_name,
    full_ids,
    holder,
    num_kept_of,
)
from opengyre.trajectory.turns import ForkReason

_NUM_KEPT_BODIES = 8
_NUM_KEPT_CUTS = 4


@dataclass(slots=True, kw_only=True)
class Session:
    """`execution`'s turns. `admit` and `commit`/`abandon` are synchronous: no half states."""

    execution: str
    renderer: ModelRenderer
    max_context_tokens: int
    num_turns: int = 0
    _nodes_by_key: dict[bytes, list[Node]] = field(default_factory=dict)
    _nodes_by_turn: dict[str, Node] = field(default_factory=dict)
    _nodes_by_name: dict[str, Node] = field(default_factory=dict)
    _calls_by_id: dict[str, Call] = field(default_factory=dict)
    _retryable: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)
    _unsure: dict[str, bytes] = field(default_factory=dict)
    _bodies: dict[str, bytes] = field(default_factory=dict)
    _cuts: deque[Cut] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT_CUTS))
    _latest: Node | None = None

    def place(self, incoming: Incoming) -> Place:
        """Parent and prompt of a call; changes nothing.

        Raises Refusal when the prompt leaves no room for an answer (context_length_exceeded), and
        for a `previous` turn or a forced call that cannot be had.
        """
        request = incoming.request
        history = History.of(self.messages(request), request.offered_tools)
        try:
            parent, prompt_ids, reason = self._attach(history)
        except TooManyIdsError as error:
            raise self._too_long(f"more than {error.args[0]}") from error
        num_kept = num_kept_of(parent, prompt_ids, is_extended=reason is ForkReason.NONE)
        parent = holder(parent, num_kept)
        forced_ids = self.forced(request)
        prompt_ids += forced_ids
        self._check_room(len(prompt_ids))
        return Place(
            parent=parent,
            fork_reason=reason,
            prompt_ids=prompt_ids,
            num_kept=num_kept,
            forced_ids=forced_ids,
            keys=history.keys,
            history_key=history.so_far[-1],
            call_key=call_key(incoming.raw, history.so_far[-1]),
            delta=body_delta(incoming.body, self.body(parent)),
        )

    def admit(self, incoming: Incoming, place: Place) -> Attempt:
        """Give the call its turn."""
        if place.parent is not None and place.fork_reason is ForkReason.NONE:
            self.take_retryable(self._unsure.pop(place.parent.turn, b""))
        retried = self.take_retryable(place.call_key)
        if retried is None:
            self.num_turns += 1
        number, attempt = retried or (self.num_turns, 0)
        return Attempt(
            execution=self.execution,
            number=number,
            attempt=attempt,
            incoming=incoming.placed(),
            place=self._above(place, f"{self.execution}.t{number}", incoming.body),
        )

    def _above(self, place: Place, turn: str, body: bytes) -> Place:
        """A turn keeps no tokens of another attempt of itself, but of what that one keeps."""
        node = place.parent
        if node is None or node.turn != turn:
            return place
        num_kept = min(place.num_kept, node.num_kept)
        parent = holder(node.parent, num_kept)
        delta = body_delta(body, self.body(parent))
        return replace(place, parent=parent, num_kept=num_kept if parent else 0, delta=delta)

    def node(self, turn: str, attempt: int | None = None) -> Node | None:
        """A committed attempt of a turn; None is the one that stands, the last."""
        if attempt is None:
            return self._nodes_by_turn.get(turn)
        return self._nodes_by_name.get(attempt_name(turn, attempt))

    def parser(self, attempt: Attempt) -> AnswerParser:
        """Of the ids that are sampled for `attempt`."""
        request = attempt.incoming.request
        call_stem = f"call_{attempt.name.replace('.', '_')}"
        return self.renderer.parser(
            stops=request.sampling.stop,
            call_id=lambda index: f"{call_stem}_{index}",
            is_parallel=request.is_parallel,
            forced=attempt.place.forced_ids,
            tools=request.offered_tools,
        )

    def commit(self, attempt: Attempt, *, completion_ids: Sequence[int], message: Message) -> Node:
        """The terminal event was written: the turn is part of the tree from now on."""
        place = attempt.place
        node = Node(
            turn=attempt.turn,
            attempt=attempt.attempt,
            key=place.keys.next(place.history_key, message),
            protocol=attempt.incoming.protocol,
            parent=place.parent,
            num_kept=place.num_kept,
            new_ids=array("i", place.prompt_ids[place.num_kept :]),
            completion=array("i", completion_ids),
            message=message,
            delta=place.delta,
            asked=attempt.incoming.asked,
        )
        self.adopt(node, body=attempt.incoming.body)
        return node

    def adopt(self, node: Node, *, body: bytes) -> None:
        """Make a turn that was committed, now or in an earlier life, a part of the tree."""
        self._nodes_by_key.setdefault(node.key, []).append(node)
        self._nodes_by_turn[node.turn] = node
        self._nodes_by_name[node.name] = node
        self._calls_by_id.update({call.call_id: call for call in node.message.calls})
        self._remember_body(node, body)
        self._latest = node

    def abandon(self, attempt: Attempt, completion_ids: Sequence[int]) -> None:
        """Its terminal event will never be written: the same call is a retry of it. Idempotent.

        A client may go on from the whole parts of `completion_ids` that it has seen.
        """
        if attempt.is_abandoned:
            return
        self._cuts.append(Cut.of(attempt, completion_ids))
        attempt.is_abandoned = True
        self._offer_retry(attempt)

    def expect_retry(self, attempt: Attempt) -> None:
        """It was committed, and yet its client may never have had the answer: the same call is a
        retry of it until a call goes on from that answer."""
        self._unsure[attempt.turn] = attempt.place.call_key
        self._offer_retry(attempt)

    def _offer_retry(self, attempt: Attempt) -> None:
        following = (attempt.number, attempt.attempt + 1)
        self._retryable.setdefault(attempt.place.call_key, []).append(following)

    def messages(self, request: Request) -> tuple[Message, ...]:
        """All messages of a call, also those of the earlier answers that it only names."""
        instructions, own = _split(request)
        later: list[tuple[Message, ...]] = []
        while request.previous:
            node = self._named(request.previous, param="previous_response_id")
            later.append((node.message, *own))
            request = node.asked or DIALECTS[node.protocol].parse(decode_object(self.body(node)))
            _, own = _split(request)
        messages = (*instructions, *own, *chain.from_iterable(reversed(later)))
        return tuple(self._referred(message) for message in messages)

    def _referred(self, message: Message) -> Message:
        return (
            self._named(message.reference, param="input").message if message.reference else message
        )

    def _named(self, attempt: str, *, param: str) -> Node:
        """What was committed under an attempt's name. Raises Refusal."""
        node = self._nodes_by_name.get(attempt)
        if node is None:
            is_previous = param == "previous_response_id"
            raise Refusal(
                f"Previous response with id '{attempt}' not found."
                if is_previous
                else f"Item of '{attempt}' not found.",
                code="previous_response_not_found" if is_previous else "item_not_found",
                param=param,
            )
        return node

    def forced(self, request: Request) -> list[int]:
        """The beginning of a call, when one is demanded: prompt, not sampled."""
        if request.choice.mode not in (ChoiceMode.REQUIRED, ChoiceMode.NAMED):
            return []
        forced = self.renderer.forced_prefix(request.choice.name or None)
        if forced is None:
            raise Refusal("this model's format cannot force a call", param="tool_choice")
        return forced

    def _attach(self, history: History) -> tuple[Node | None, list[int], ForkReason]:
        """(turn it comes after or is nearest to, prompt ids, why it forks from it)."""
        reason = ForkReason.NEW_ROOT
        node: Node | None = None
        for k in range(len(history.messages), 0, -1):  # as many as a client likes: one look each
            if history.messages[k - 1].role is not Role.ASSISTANT:
                continue
            if nodes := self._nodes_by_key.get(history.so_far[k]):
                node = _best(nodes, history.messages[k - 1])
                extended, reason = self._extended(node, history, k)
                if extended is not None:
                    return node, extended, ForkReason.NONE
                break
            is_last = reason is ForkReason.NEW_ROOT
            if is_last and (resumed := self._resumed(history, k)):
                return *resumed, ForkReason.KEPT_PARTS
            reason = ForkReason.REWRITTEN_TURN
        if self._latest is None:
            reason = ForkReason.NONE
        restored = [self._restored(message, history.keys) for message in history.messages]
        return node or self._latest, self.renderer.root(restored, history.tools), reason

    def _extended(
        self, node: Node, history: History, k: int
    ) -> tuple[list[int] | None, ForkReason]:
        """The prompt after `node`, which is the first `k` messages; None and why there is none."""
        sent, later = history.messages[k - 1], history.messages[k:]
        if not is_same_reasoning(sent.reasoning, node.message.reasoning):
            return None, ForkReason.REWRITTEN_REASONING
        if any(message.role is Role.ASSISTANT for message in later):
            return None, ForkReason.REWRITTEN_TURN
        if not later:
            return None, ForkReason.NO_BRIDGE
        ids, sampled = full_ids(node), node.completion.tolist()
        del ids[len(ids) - len(sampled) :]
        extended = self._bridged(ids, sampled, node.message, later, history.tools)
        return extended, ForkReason.NO_BRIDGE

    def _bridged(
        self,
        prompt_ids: list[int],
        sampled_ids: list[int],
        answer: Message,
        later: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """`prompt_ids`, made longer by the answer and what comes after it."""
        following = self.renderer.extension(
            prompt_ids, sampled_ids, later, tools=tools, calls=answer.calls
        )
        if following is None:
            return None
        prompt_ids += sampled_ids
        prompt_ids += following
        return prompt_ids

    def _resumed(self, history: History, k: int) -> tuple[Node | None, list[int]] | None:
        """Parent and prompt if message `k`, the last answer, is the whole parts of one that was
        cut."""
        sent, later = history.messages[k - 1], history.messages[k:]
        for cut in reversed(self._cuts):
            if cut.attempt.place.history_key != history.so_far[k - 1]:
                continue
            seen_ids = self._seen_ids(cut, sent)
            if not seen_ids:
                continue
            if not later:
                return cut.attempt.place.parent, cut.prompt_ids() + seen_ids
            extended = self._bridged(cut.prompt_ids(), seen_ids, sent, later, history.tools)
            if extended is not None:
                return cut.attempt.place.parent, extended
        return None

    def _seen_ids(self, cut: Cut, sent: Message) -> list[int]:
        """The ids of `cut` up to the end of the parts that `sent` says; none if it says others."""
        parser, keys = self.parser(cut.attempt), cut.attempt.place.keys
        sampled = cut.completion.tolist()
        num_seen, was_between = 0, parser.is_between_parts
        for number, token in enumerate(sampled):
            parser.feed(token)
            if parser.is_between_parts != was_between:
                was_between = not was_between
                is_said = _is_said(sent, parser.message(), keys)
                num_seen = number + was_between if is_said else num_seen
        if was_between and _is_said(sent, parser.message(), keys):
            num_seen = len(sampled)
        return sampled[:num_seen]

    def _restored(self, message: Message, keys: Keys) -> Message:
        """Calls of ours that came back equal in value, as they were sampled."""
        if not message.calls:
            return message
        calls = tuple(self._restored_call(call, keys) for call in message.calls)
        return msgspec.structs.replace(message, calls=calls)

    def _restored_call(self, call: Call, keys: Keys) -> Call:
        ours = self._calls_by_id.get(call.call_id)
        return ours if ours is not None and keys.is_same_call(ours, call) else call

    def take_retryable(self, call_key: bytes) -> tuple[int, int] | None:
        """(turn, attempt) of a request that repeats an abandoned one."""
        waiting = self._retryable.get(call_key)
        if not waiting:
            return None
        following = waiting.pop()
        if not waiting:
            del self._retryable[call_key]
        return following

    def _check_room(self, num_prompt: int) -> None:
        if num_prompt >= self.max_context_tokens:
            raise self._too_long(str(num_prompt))

    def _too_long(self, num_prompt: str) -> Refusal:
        return Refusal(
            f"This model's maximum context length is {self.max_context_tokens} tokens. "
            f"However, your messages resulted in {num_prompt} tokens. "
            "Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )

    def _remember_body(self, node: Node, body: bytes) -> None:
        """Whole bodies of the newest leaves: the next call of a branch is compared with its own."""
        if node.parent is not None:
            self._bodies.pop(node.parent.name, None)
        self._bodies[node.name] = body
        while len(self._bodies) > _NUM_KEPT_BODIES:
            del self._bodies[next(iter(self._bodies))]

    def body(self, node: Node | None) -> bytes:
        """The raw body of a turn, from its deltas if it is not kept whole."""
        deltas: list[bytes] = []
        while node is not None and node.name not in self._bodies:
            deltas.append(node.delta)
            node = node.parent
        body = b"" if node is None else self._bodies[node.name]
        for delta in reversed(deltas):
            body = restore_body(delta, body)
        return body


def _split(request: Request) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The instructions of a call, which are nobody else's, and its other messages."""
    start = int(request.has_instructions)
    return request.messages[:start], request.messages[start:]


def _is_said(sent: Message, parts: Message, keys: Keys) -> bool:
    """`sent` says what `parts` are, which is something."""
    if not keys.is_same_message(sent, parts):
        return False
    is_more = bool(parts.text or parts.calls)
    reasoning = (sent.reasoning or "").strip()
    return (is_more and not reasoning) or reasoning == (parts.reasoning or "").strip() != ""


def _best(nodes: list[Node], message: Message) -> Node:
    """Among turns with the same history: the one whose call ids these are, else the newest."""
    ids = [call.call_id for call in message.calls]
    for node in reversed(nodes):
        if ids and [call.call_id for call in node.message.calls] == ids:
            return node
    return nodes[-1]
