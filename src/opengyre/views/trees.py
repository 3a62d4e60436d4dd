"""The tree of each execution of a run, and what became of each of its attempts.

Owns: bringing together turns, verdicts, accounts and what accepted steps trained. Must not know how
it is shown. Invariant: token ids are not needed, so nothing but the journal is read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opengyre.seams.records import TokenRecord, TurnRecord
from opengyre.store import observations as seen
from opengyre.store.journal import Row
from opengyre.store.trees import tree_of
from opengyre.trajectory.account import DROPPING, Reason, TokenAccount
from opengyre.trajectory.tree import Fork, Node, Tree, line_of
from opengyre.trajectory.turns import TRAINED_ROLES, BrokenRecordError
from opengyre.views.check_steps import ExactlyOnce
from opengyre.views.consumed import (
    NOT_TOLD,
    STRUCTURAL,
    Consumed,
    consumed_by,
    reason_apart,
    told_account,
)
from opengyre.views.fold import Fold
from opengyre.views.restored import Range, cut, turn_number
from opengyre.views.run_state import ExecutionView, RunState

WHOLE = (Reason.TRUNCATED, Reason.OVERLONG, Reason.NOT_APPLIED)
"""Reasons that mask all of an execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """One attempt: `trained` are depths of its line; what else it sampled ended for `reason`, ""
    where nothing is left. `is_dropped`: that rest does not take part in its group's update."""

    node: Node
    record: TurnRecord
    trained: tuple[Range, ...]
    reason: str
    is_dropped: bool

    @property
    def num_trained(self) -> int:
        return sum(end - begin for begin, end in self.trained)

    @property
    def num_rest(self) -> int:
        return self.node.num_sampled - self.num_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTree:
    """`step` consumed it, None: none did; `advantage` None: it took no part, or nothing is told.
    `problem`: why there is no tree, "" if there is one."""

    one: ExecutionView
    ends: tuple[NodeEnd, ...]
    account: TokenAccount
    step: int | None
    advantage: float | None
    problem: str = ""

    @property
    def forks(self) -> dict[str, int]:
        """Nodes that do not simply go on, by what they are."""
        forks = Counter(end.node.fork.value for end in self.ends)
        plain = (Fork.ROOT.value, Fork.CONTINUED.value)
        return {name: forks[name] for name in sorted(forks) if name not in plain}

    @property
    def num_turns(self) -> int:
        return len({end.node.turn for end in self.ends})


@dataclass(slots=True)
class RunTrees:
    """All that a run's journal tells, to be asked for one execution after the other."""

    state: RunState
    steps: ExactlyOnce
    trained_roles: Sequence[str] = TRAINED_ROLES
    _consumed: Consumed = field(init=False)
    _paths: dict[str, list[seen.PathDigest]] = field(init=False)
    _turns: dict[str, list[TurnRecord]] = field(init=False)

    def __post_init__(self) -> None:
        self._consumed = consumed_by(self.steps.reports(), self.state)
        self._paths, self._turns = {}, {}
        for micro_step in self.steps.accepted():
            for path in micro_step.paths:
                self._paths.setdefault(path.execution, []).append(path)
        for turn in self.state.turns.values():
            self._turns.setdefault(turn.execution, []).append(turn)

    def of(self, execution: str) -> ExecutionTree:
        """Turns that contradict each other give a problem in place of a tree."""
        one = self.state.executions[execution]
        turns = self._turns.get(execution, [])
        tree, problem = _tree(turns, num_given_up=one.num_given_up_turns)
        paths = self._paths.get(execution, [])
        by_attempt = {(turn.turn, turn.attempt): turn for turn in turns}
        trained = _trained_by_node(tree, paths)
        rest = _Rest(self, one, tree, paths)
        return ExecutionTree(
            one=one,
            ends=tuple(
                _node_end(
                    node, by_attempt[node.turn, node.attempt], trained.get(node.index, []), rest
                )
                for node in tree.nodes
            ),
            account=self._account(one, tree, trained),
            step=self._consumed.step_by_execution.get(execution),
            advantage=None if (told := self.told(execution)) is None else told.advantage,
            problem=problem,
        )

    def told(self, execution: str) -> seen.MemberAccount | None:
        return self._consumed.account(execution)

    def reason_apart(self, one: ExecutionView) -> str:
        """Why nothing of it was to be trained; "" if a step consumed it."""
        if one.execution in self._consumed.step_by_execution:
            return ""
        return reason_apart(self.state, one).value

    def _account(
        self, one: ExecutionView, tree: Tree, trained: Mapping[int, list[Range]]
    ) -> TokenAccount:
        told = self.told(one.execution)
        if told is not None:
            return told_account(told)
        num_trained = sum(end - begin for ranges in trained.values() for begin, end in ranges)
        dropped: Counter[str] = Counter()
        for node in tree.nodes:
            reason = tree.reason_of(node)
            if reason is not None:
                dropped[reason.value] += node.num_sampled
        turns = self._turns.get(one.execution, [])
        num_sampled = sum(turn.num_completion_tokens for turn in turns)
        num_rest = num_sampled - num_trained - dropped.total()
        dropped += Counter({self.reason_apart(one) or NOT_TOLD: num_rest})
        return TokenAccount(sampled=num_sampled, trained=num_trained, dropped=dict(dropped))


class _Rest:
    """Why what a node sampled was not trained."""

    def __init__(
        self, run: RunTrees, one: ExecutionView, tree: Tree, paths: Sequence[seen.PathDigest]
    ) -> None:
        self._tree = tree
        self._roles = run.trained_roles
        self._counted = {
            piece.node.index: piece.end
            for path in paths
            if not path.num_tokens and (leaf := _leaf(tree, path)) is not None
            for piece in line_of(leaf)
        }
        told = run.told(one.execution)
        apart = run.reason_apart(one)
        self._dropped = apart or _exclusion(told)
        masked = {} if told is None else told.masked
        self._masked = next((one.value for one in WHOLE if one.value in masked), "")
        self._is_told = told is not None

    def of(self, node: Node) -> tuple[str, bool]:
        """(reason, is it dropped)."""
        own = self._tree.reason_of(node)
        if own is not None:
            return own.value, own in DROPPING
        if self._dropped:
            return self._dropped, True
        if node.role.value not in self._roles:
            return Reason.UNTRAINED_ROLE.value, False
        if self._masked:
            return self._masked, False
        if node.index in self._counted:
            return Reason.NO_VARIANCE.value, False
        return (Reason.NOT_SELECTED.value if self._is_told else NOT_TOLD), False


def open_trees(rows: Iterable[Row], *, trained_roles: Sequence[str] = TRAINED_ROLES) -> RunTrees:
    fold, steps = Fold(), ExactlyOnce()
    for row in rows:
        fold.apply(row)
        steps.see(row, fold.state)
    return RunTrees(fold.state, steps, trained_roles)


def _tree(turns: Sequence[TurnRecord], *, num_given_up: int) -> tuple[Tree, str]:
    """The tree and "", or an empty one and what is wrong."""
    earlier: list[TurnRecord] = []
    present: list[TurnRecord] = []
    for turn in turns:
        is_given_up = 0 < num_given_up >= turn_number(turn.turn)
        (earlier if is_given_up else present).append(turn)
    try:
        given_up = map(_without_ids, earlier)
        return tree_of(map(_without_ids, present), given_up=given_up), ""
    except BrokenRecordError as error:
        return Tree(), str(error)


def _without_ids(turn: TurnRecord) -> TokenRecord:
    num_sampled = turn.num_completion_tokens
    return TokenRecord(
        header=turn,
        new_prompt_ids=[0] * turn.num_new_prompt_tokens,
        completion_ids=[0] * num_sampled,
        logprobs=[0.0] * num_sampled,
        request_delta=b"",
    )


def _trained_by_node(tree: Tree, paths: Iterable[seen.PathDigest]) -> dict[int, list[Range]]:
    """Depths that accepted steps trained, by the node that holds them."""
    found: dict[int, list[Range]] = {}
    for path in paths:
        leaf = _leaf(tree, path)
        pieces = [] if leaf is None else line_of(leaf)
        begins = [piece.begin for piece in pieces]
        for place, part in cut(path.trained, begins, pieces[-1].end if pieces else 0):
            found.setdefault(pieces[place].node.index, []).append(part)
    return found


def _leaf(tree: Tree, path: seen.PathDigest) -> Node | None:
    found = (node for node in tree.nodes if node.turn == path.turn and node.is_standing)
    return next(found, None)


def _node_end(node: Node, record: TurnRecord, trained: list[Range], rest: _Rest) -> NodeEnd:
    num_trained = sum(end - begin for begin, end in trained)
    reason, is_dropped = rest.of(node) if num_trained < node.num_sampled else ("", False)
    return NodeEnd(
        node=node,
        record=record,
        trained=tuple(sorted(trained)),
        reason=reason,
        is_dropped=is_dropped,
    )


def _exclusion(told: seen.MemberAccount | None) -> str:
    if told is None or told.advantage is not None:
        return ""
    reasons = [name for name in told.dropped if name not in STRUCTURAL]
    return reasons[0] if reasons else Reason.NO_VERDICT.value
