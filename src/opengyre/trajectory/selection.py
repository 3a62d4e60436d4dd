"""Which paths of an execution are trained, and which of their tokens.

Owns: leaves, the draw, the account of an execution's tokens. Must not know rewards. Invariants: no
token is trained twice; a token is trained only if the policy sampled it in a standing, committed
attempt of a trained role; the highest role class with untrained tokens is drawn from first; within
it a leaf's chance is its share of the untrained tokens. Source: PAPER.md (J_max, leaf priority).
"""

from collections import Counter
from collections.abc import Sequence
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
    beginnings of nodes, so one number tells all."""

    def __init__(self, tree: Tree, trained_roles: Sequence[Role]) -> None:
        self._tree = tree
        self._trained_roles = trained_roles
        self._trainable = [trainable_of(tree, node, trained_roles) for node in tree.nodes]
        self._leaves = leaves_of(tree, trained_roles)
        self._taken = [node.begin for node in tree.nodes]
        self._num_trained = 0

    def next_leaf(self, role: Role, rng: np.random.Generator) -> Node | None:
        leaves = [leaf for leaf in self._leaves if leaf.role is role]
        if not leaves:
            return None
        untrained = self._untrained()
        totals = np.cumsum([untrained[leaf.index] for leaf in leaves])
        if totals[-1] == 0:
            return None
        drawn = rng.integers(int(totals[-1]))
        return leaves[int(np.searchsorted(totals, drawn, side="right"))]

    def take(self, leaf: Node) -> Path:
        pieces = line_of(leaf)
        trained: list[Range] = []
        for piece in pieces:
            begin, end = self._open(piece.node, piece.end)
            if begin < end:
                trained.append((begin, end))
                self._num_trained += end - begin
            taken = self._taken[piece.node.index]
            self._taken[piece.node.index] = max(taken, piece.end)
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

    def _untrained(self) -> list[int]:
        """Of each node: how many untrained trainable tokens its whole line has."""
        before: list[int] = []
        totals: list[int] = []
        for node in self._tree.nodes:
            before.append(self._before(node, before))
            begin, end = self._open(node, node.end)
            totals.append(before[-1] + max(0, end - begin))
        return totals

    def _before(self, node: Node, before: Sequence[int]) -> int:
        """The same of what its line has before the node itself."""
        at = node.parent
        if at is None:
            return 0
        begin, end = self._open(at, node.begin)
        return before[at.index] + max(0, end - begin)
