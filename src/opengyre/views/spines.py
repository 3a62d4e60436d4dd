"""A tree of turns as spines, each with what branches off it, in the order in which it is read.

Owns: which node goes on from which, and which attempts are told together. Must not know text or
pictures. Invariants: each node is in one stretch of one spine; a spine has one role.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from opengyre.trajectory.tree import Fork, Node
from opengyre.views.trees import NodeEnd

BEGINNINGS = frozenset({Fork.SUB_AGENT, Fork.SUMMARY, Fork.COMPACTION, Fork.SIDE})
"""What begins something of its own, also where it keeps tokens of what was before."""


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Neighbours on a spine: the first, and those that simply go on, or did the same as it."""

    ends: list[NodeEnd]
    branches: list["Spine"] = field(default_factory=list)

    @property
    def first(self) -> Node:
        return self.ends[0].node

    @property
    def last(self) -> Node:
        return self.ends[-1].node

    def takes(self, node: Node) -> bool:
        return node.fork in (Fork.CONTINUED, self.last.fork) and node.fork is not Fork.RETRY


@dataclass(slots=True, kw_only=True)
class Spine:
    """A node, the one that goes on from it, and so on."""

    stretches: list[Stretch]

    @property
    def ends(self) -> list[NodeEnd]:
        return [end for stretch in self.stretches for end in stretch.ends]


def spines_of(ends: Sequence[NodeEnd], *, is_collapsed: bool = True) -> list[Spine]:
    """The spines that begin at a root, with all others as branches; not collapsed, a stretch is
    one attempt."""
    children: dict[int, list[NodeEnd]] = {}
    for end in ends:
        parent = end.node.parent
        children.setdefault(-1 if parent is None else parent.index, []).append(end)
    next_of = {parent: _next_of(some) for parent, some in children.items()}
    spine_of: dict[int, Spine] = {}
    stretch_of: dict[int, Stretch] = {}
    roots: list[Spine] = []
    for end in ends:
        node = end.node
        parent = node.parent
        if parent is not None and next_of[parent.index] is end:
            spine = spine_of[parent.index]
            last = spine.stretches[-1]
            if is_collapsed and last.takes(node):
                last.ends.append(end)
            else:
                spine.stretches.append(Stretch(ends=[end]))
        else:
            spine = Spine(stretches=[Stretch(ends=[end])])
            (roots if parent is None else stretch_of[parent.index].branches).append(spine)
        spine_of[node.index] = spine
        stretch_of[node.index] = spine.stretches[-1]
    return roots


def _next_of(children: Sequence[NodeEnd]) -> NodeEnd | None:
    """The child that the spine goes on with: the last standing one of the same role."""
    for end in reversed(children):
        node = end.node
        is_same = node.parent is not None and node.role is node.parent.role
        if is_same and node.is_standing and node.fork not in BEGINNINGS:
            return end
    return None
