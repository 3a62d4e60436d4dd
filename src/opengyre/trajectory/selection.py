"""Which paths of an execution are trained, and which of their tokens.

Owns: leaves, the draw, the account of an execution's tokens. Must not know rewards. Invariants: no
token is trained twice; a token is trained only if the policy sampled it in a standing, committed
attempt of a trained role; the highest role class with untrained tokens is drawn from first; within
it a leaf's chance is its share of the untrained tokens. Source: PAPER.md (J_max, leaf priority).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opengyre.trajectory.account import DROPPING, Reason, TokenAccount
from opengyre.trajectory.tree import Node, Piece, Tree, line_of
from opengyre.trajectory.turns import TRAINED_ROLES, Role

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    """`max_paths` is J_max, 0 for no bound; `trained_roles` from the highest class down."""

    max_paths: int = 5
    trained_roles: Sequence[Role] = TRAINED_ROLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The line to `leaf`. `trained`: its depths [begin, end) that this path trains, in order;
    its other tokens are context."""

    leaf: Node
    pieces: tuple[Piece, ...]
    trained: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return self.leaf.end

    @property
    def num_trained_tokens(self) -> int:
        return sum(end - begin for begin, end in self.trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """`paths` in the order in which they were drawn."""

    paths: tuple[Path, ...]
    account: TokenAccount


def select(tree: Tree, *, settings: SelectionSettings, rng: np.random.Generator) -> Selection:
    """Draw at most `max_paths` paths of `tree`. The same generator state gives the same paths."""
    draw = _Draw(tree, settings.trained_roles)
    paths: list[Path] = []
    for role in settings.trained_roles:
        while not settings.max_paths or len(paths) < settings.max_paths:
            leaf = draw.next_leaf(role, rng)
            if leaf is None:
                break
            paths.append(draw.take(leaf))
    return Selection(paths=tuple(paths), account=draw.account())


def trainable_of(tree: Tree, node: Node, trained_roles: Sequence[Role]) -> Range:
    """Depths of `node` that may be trained; nothing is predicted without a token before it."""
    if tree.reason_of(node) is not None or node.role not in trained_roles:
        return (node.end, node.end)
    return (max(node.sampled_begin, 1), max(node.end, 1))


def leaves_of(tree: Tree, trained_roles: Sequence[Role]) -> list[Node]:
    """Nodes with trainable tokens whose line is not the beginning of another such node's."""
    is_held = [False] * len(tree.nodes)
    reaches = [False] * len(tree.nodes)
    leaves: list[Node] = []
    for node in reversed(tree.nodes):
        begin, end = trainable_of(tree, node, trained_roles)
        if begin < end and not is_held[node.index]:
            leaves.append(node)
        reaches[node.index] |= begin < end
        parent = node.parent
        if parent is not None and reaches[node.index]:
            reaches[parent.index] = True
            is_held[parent.index] |= node.begin == parent.end
    leaves.reverse()
    return leaves


class _Draw:
    """`_taken` is, for each node, the depth up to which a drawn path covers it: paths keep
    beginnings of nodes, so one number tells all. `_untrained`: how many untrained trainable tokens
    its whole line has, `_before` of these before the node itself."""

    def __init__(self, tree: Tree, trained_roles: Sequence[Role]) -> None:
        self._tree = tree
        self._trained_roles = trained_roles
        self._trainable = [trainable_of(tree, node, trained_roles) for node in tree.nodes]
        self._taken = [node.begin for node in tree.nodes]
        self._num_trained = 0
        self._children: list[list[Node]] = [[] for _ in tree.nodes]
        for node in tree.nodes:
            if node.parent is not None:
                self._children[node.parent.index].append(node)
        self._before = [0] * len(tree.nodes)
        self._untrained = np.zeros(len(tree.nodes), np.int64)
        self._count(tree.nodes)
        leaves = leaves_of(tree, trained_roles)
        self._leaves_by_role = {
            role: np.array([leaf.index for leaf in leaves if leaf.role is role], np.int64)
            for role in trained_roles
        }

    def next_leaf(self, role: Role, rng: np.random.Generator) -> Node | None:
        leaves = self._leaves_by_role[role]
        totals = np.cumsum(self._untrained[leaves])
        if not len(totals) or totals[-1] == 0:
            return None
        drawn = rng.integers(int(totals[-1]))
        place = int(np.searchsorted(totals, drawn, side="right"))
        return self._tree.nodes[int(leaves[place])]

    def take(self, leaf: Node) -> Path:
        pieces = line_of(leaf)
        trained: list[Range] = []
        changed: list[Node] = []
        for piece in pieces:
            begin, end = self._open(piece.node, piece.end)
            if begin < end:
                trained.append((begin, end))
                changed = changed or [piece.node]
                self._num_trained += end - begin
            taken = self._taken[piece.node.index]
            self._taken[piece.node.index] = max(taken, piece.end)
        self._count(self._with_all_below(changed))
        return Path(leaf=leaf, pieces=tuple(pieces), trained=tuple(trained))

    def account(self) -> TokenAccount:
        masked: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        num_trainable = 0
        for node, (begin, end) in zip(self._tree.nodes, self._trainable, strict=True):
            reason = self._tree.reason_of(node)
            if reason in DROPPING:
                dropped[reason] += node.num_sampled
            elif node.role not in self._trained_roles:
                masked[Reason.UNTRAINED_ROLE] += node.num_sampled
            else:
                num_trainable += end - begin
                masked[Reason.NO_CONTEXT] += node.num_sampled - (end - begin)
        masked[Reason.NOT_SELECTED] = num_trainable - self._num_trained
        return TokenAccount(
            sampled=self._tree.num_sampled,
            trained=self._num_trained,
            masked={str(reason): num for reason, num in masked.items() if num},
            dropped={str(reason): num for reason, num in dropped.items() if num},
        )

    def _open(self, node: Node, upto: int) -> Range:
        """Trainable depths of `node` below `upto` that no drawn path covers."""
        begin, end = self._trainable[node.index]
        return max(begin, self._taken[node.index]), min(end, upto)

    def _count(self, nodes: Iterable[Node]) -> None:
        """Of `nodes`, which come after their parents if these are among them."""
        for node in nodes:
            before, at = 0, node.parent
            if at is not None:
                begin, end = self._open(at, node.begin)
                before = self._before[at.index] + max(0, end - begin)
            begin, end = self._open(node, node.end)
            self._before[node.index] = before
            self._untrained[node.index] = before + max(0, end - begin)

    def _with_all_below(self, nodes: list[Node]) -> Iterator[Node]:
        """No line outside of this has anything of theirs."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            yield node
            waiting += self._children[node.index]
