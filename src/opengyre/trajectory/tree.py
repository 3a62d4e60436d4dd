"""All turns of one execution as a tree of token nodes with shared prefixes.

Owns: nodes, their provenance, which attempt stands for a turn, why a node forks. Must not know
rewards or groups. Invariants: ids are stored once, in the node that was first to have them; the
nodes on the way to a node, joined, are exactly what the engine saw and sampled there (P10); the
cost of an insertion is proportional to what is new in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from opengyre.trajectory.account import Reason
from opengyre.trajectory.turns import (
    BrokenRecordError,
    ForkReason,
    Role,
    SampledSpan,
    TurnTokens,
)

Ids = np.ndarray[Any, np.dtype[np.int32]]
Logprobs = np.ndarray[Any, np.dtype[np.float32]]


class Fork(StrEnum):
    """What a node is to its parent: the harness's doing, read from roles and the matcher's word."""

    CONTINUED = "continued"
    ROOT = "root"
    SUB_AGENT = "sub_agent"
    SUMMARY = "summary"
    COMPACTION = "compaction"
    SIDE = "side"
    PARALLEL = "parallel"
    RETRY = "retry"
    RELAUNCHED = "relaunched"
    NEW_HISTORY = "new_history"
    REWRITE = "rewrite"
    REWRITTEN_REASONING = "rewritten_reasoning"
    NO_BRIDGE = "no_bridge"
    KEPT_PARTS = "kept_parts"


_BY_REASON = {
    ForkReason.NONE: Fork.PARALLEL,
    ForkReason.NEW_ROOT: Fork.NEW_HISTORY,
    ForkReason.REWRITTEN_TURN: Fork.REWRITE,
    ForkReason.REWRITTEN_REASONING: Fork.REWRITTEN_REASONING,
    ForkReason.NO_BRIDGE: Fork.NO_BRIDGE,
    ForkReason.KEPT_PARTS: Fork.KEPT_PARTS,
}
_SUMMARY_OF = {
    Role.MAIN: Role.MAIN_SUMMARY,
    Role.SUB_AGENT: Role.SUB_AGENT_SUMMARY,
}
_SUMMARIES = frozenset(_SUMMARY_OF.values())


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One attempt of a turn. `ids` are its new prompt ids (injected), then what was sampled; they
    lie at depths [begin, end) of its line, of which the first `begin` are its parent's line's; the
    parent has the last of them.

    `logprobs` are of the sampled ids. `has_next`: a committed turn of its role goes on from all of
    it.
    """

    index: int
    turn: str
    attempt: int
    role: Role
    fork: Fork
    parent: "Node | None"
    begin: int
    num_injected: int
    ids: Ids
    logprobs: Logprobs
    spans: tuple[SampledSpan, ...]
    launch: int
    is_committed: bool
    is_standing: bool = True
    has_next: bool = False

    @property
    def end(self) -> int:
        """Depth behind its last token: the length of its line in tokens."""
        return self.begin + len(self.ids)

    @property
    def sampled_begin(self) -> int:
        """Depth of its first sampled token."""
        return self.begin + self.num_injected

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.num_injected


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Depths [begin, end) of a line lie in `node`, from its first token on."""

    node: Node
    begin: int
    end: int


@dataclass(slots=True)
class Tree:
    """`nodes` in the order of insertion: a parent stands before its children. `launch` is the
    present one; what earlier ones sampled is not trained."""

    nodes: list[Node] = field(default_factory=list)
    launch: int = 1
    _standing: dict[str, Node] = field(default_factory=dict)
    _by_attempt: dict[tuple[str, int], Node] = field(default_factory=dict)
    _launches: set[int] = field(default_factory=set)
    _last_of_role: dict[Role, Node] = field(default_factory=dict)

    def insert(self, turn: TurnTokens) -> Node:
        """Add one attempt of a turn. Raises BrokenRecordError and changes nothing then."""
        _check(turn)
        if (turn.turn, turn.attempt) in self._by_attempt:
            raise BrokenRecordError(f"{turn.turn} attempt {turn.attempt} is told twice")
        named = self._parent_of(turn)
        parent = _holder(named, turn.num_kept_tokens)
        node = Node(
            index=len(self.nodes),
            turn=turn.turn,
            attempt=turn.attempt,
            role=turn.role,
            fork=self._fork_of(turn, named, parent),
            parent=parent,
            begin=turn.num_kept_tokens if parent else 0,
            num_injected=len(turn.new_prompt_ids),
            ids=_joined(turn.new_prompt_ids, turn.completion_ids),
            logprobs=np.asarray(turn.logprobs, dtype=np.float32),
            spans=turn.spans,
            launch=turn.launch,
            is_committed=turn.is_committed,
        )
        self._stand(node)
        is_next = parent is not None and node.begin == parent.end and node.role is parent.role
        if parent is not None and is_next and node.is_committed:
            parent.has_next = True
        self.nodes.append(node)
        self._by_attempt[turn.turn, turn.attempt] = node
        self._launches.add(node.launch)
        self.launch = max(self.launch, node.launch)
        self._last_of_role[node.role] = node
        return node

    @property
    def num_sampled(self) -> int:
        return sum(node.num_sampled for node in self.nodes)

    @property
    def num_tokens(self) -> int:
        """Each token once, abandoned attempts too."""
        return sum(len(node.ids) for node in self.nodes)

    def reason_of(self, node: Node) -> Reason | None:
        """Why what this attempt sampled cannot be trained, whatever its role; None if it can."""
        if node.launch != self.launch:
            return Reason.RELAUNCHED
        if not node.is_committed:
            return Reason.NOT_COMMITTED
        return None if node.is_standing else Reason.SUPERSEDED_ATTEMPT

    def _parent_of(self, turn: TurnTokens) -> Node | None:
        num_kept = turn.num_kept_tokens
        if not turn.parent and num_kept == 0:
            return None
        parent = self._standing.get(turn.parent)
        if turn.parent_attempt is not None:
            parent = self._by_attempt.get((turn.parent, turn.parent_attempt))
        is_there = parent is not None and parent.launch == turn.launch
        if parent is None or not is_there or not 0 <= num_kept <= parent.end:
            what = f"keeps tokens of {turn.parent or 'no turn'} that are not there"
            raise BrokenRecordError(f"{turn.turn} {what}")
        return parent

    def _stand(self, node: Node) -> None:
        """The last committed attempt stands for its turn, else the last one."""
        before = self._standing.get(node.turn)
        if before is not None and before.is_committed and not node.is_committed:
            node.is_standing = False
            return
        if before is not None:
            before.is_standing = False
        self._standing[node.turn] = node

    def _fork_of(self, turn: TurnTokens, named: Node | None, parent: Node | None) -> Fork:
        if not self.nodes:
            return Fork.ROOT
        if turn.turn in self._standing:
            return Fork.RETRY
        if turn.launch not in self._launches:
            return Fork.RELAUNCHED
        by_role = self._fork_by_role(turn, named)
        if by_role is not None:
            return by_role
        is_whole = parent is not None and parent.end == turn.num_kept_tokens
        is_first = parent is not None and is_whole and not parent.has_next
        if turn.fork_reason is ForkReason.NONE and is_first:
            return Fork.CONTINUED
        return _BY_REASON[turn.fork_reason]

    def _fork_by_role(self, turn: TurnTokens, parent: Node | None) -> Fork | None:
        """A call of another role than its parent's begins something; None if roles say nothing."""
        before = None if parent is None else parent.role
        if turn.role is Role.SIDE:
            return Fork.SIDE
        if turn.role in _SUMMARIES:
            return None if before is turn.role else Fork.SUMMARY
        if self._is_compacted(turn):
            return Fork.COMPACTION
        if turn.role is Role.MAIN and self._is_main_new():
            return Fork.ROOT if turn.fork_reason is not ForkReason.NONE else None
        is_new = turn.role is Role.SUB_AGENT and before not in (
            Role.SUB_AGENT,
            Role.SUB_AGENT_SUMMARY,
        )
        return Fork.SUB_AGENT if is_new else None

    def _is_main_new(self) -> bool:
        return not {Role.MAIN, Role.MAIN_SUMMARY} & self._last_of_role.keys()

    def _is_compacted(self, turn: TurnTokens) -> bool:
        """Its history is new, and the last that its kind of agent did was to sum it up."""
        summary = self._last_of_role.get(_SUMMARY_OF[turn.role])
        last = self._last_of_role.get(turn.role)
        is_summed_up = summary is not None and (last is None or last.index < summary.index)
        return is_summed_up and turn.fork_reason is not ForkReason.NONE


def _holder(parent: Node | None, num_kept: int) -> Node | None:
    """The node that has the last of a line's kept tokens: one that adds nothing to it is passed."""
    while parent is not None and num_kept <= parent.begin:
        parent = parent.parent
    return parent if num_kept else None


def line_of(node: Node) -> list[Piece]:
    """The pieces from the root to the end of `node`, in order."""
    pieces = [Piece(node=node, begin=node.begin, end=node.end)]
    at = node.parent
    while at is not None:
        pieces.append(Piece(node=at, begin=at.begin, end=pieces[-1].begin))
        at = at.parent
    pieces.reverse()
    return pieces


def line_ids(node: Node) -> Ids:
    """All ids of the line that ends with `node`: prompt + completion, shape [end]."""
    return np.concatenate([piece.node.ids[: piece.end - piece.begin] for piece in line_of(node)])


def _joined(first: Sequence[int], second: Sequence[int]) -> Ids:
    ids = np.empty(len(first) + len(second), dtype=np.int32)
    ids[: len(first)] = first
    ids[len(first) :] = second
    return ids


def _check(turn: TurnTokens) -> None:
    num_sampled = len(turn.completion_ids)
    end = 0
    for span in turn.spans:
        if span.start != end or span.end < span.start:
            raise BrokenRecordError(f"{turn.turn}: span starts at {span.start}, expected {end}")
        end = span.end
    if not num_sampled == len(turn.logprobs) == end:
        what = f"{num_sampled} ids, {len(turn.logprobs)} logprobs, spans up to {end}"
        raise BrokenRecordError(f"{turn.turn} has {what}")
