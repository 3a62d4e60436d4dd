"""A tree of turns as spines, each with what branches off it, in the order in which it is read.

Owns: which node goes on from which, and which attempts are told together. Must not know text or
pictures. Invariants: each node is in one spine; a spine has one role.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from opengyre.trajectory.tree import Fork
from opengyre.views.trees import NodeEnd

BEGINNINGS = frozenset({Fork.SUB_AGENT, Fork.SUMMARY, Fork.COMPACTION, Fork.SIDE})
"""What begins something of its own, also where it keeps tokens of what was before."""


@dataclass(slots=True, kw_only=True)
class Spine:
    """A node, the one that goes on from it (or from a part of it), and so on; `branches` by the
    place in `ends` that they leave. `is_joined`: `ends` are single calls beside each other."""

    ends: list[NodeEnd]
    branches: list[tuple[int, "Spine"]] = field(default_factory=list)
    is_joined: bool = False

    @property
    def num_tokens(self) -> int:
        """Depth behind its deepest token."""
        return max(end.node.end for end in self.ends)


def spines_of(ends: Sequence[NodeEnd]) -> list[Spine]:
    """The spines that begin at a root, with all others as their branches."""
    children: dict[int, list[NodeEnd]] = {}
    for end in ends:
        if end.node.parent is not None:
            children.setdefault(end.node.parent.index, []).append(end)
    next_of = {parent: _next_of(some) for parent, some in children.items()}
    place_of: dict[int, tuple[Spine, int]] = {}
    roots: list[Spine] = []
    for end in ends:
        parent = end.node.parent
        if parent is not None and next_of[parent.index] is end:
            spine, _ = place_of[parent.index]
            spine.ends.append(end)
        else:
            spine = Spine(ends=[end])
            if parent is None:
                roots.append(spine)
            else:
                above, place = place_of[parent.index]
                above.branches.append((place, spine))
        place_of[end.node.index] = (spine, len(spine.ends) - 1)
    return roots


def joined(spines: Sequence[Spine]) -> list[Spine]:
    """Single calls of one kind are told together, where the first of them stood."""
    found: dict[tuple[object, ...], Spine] = {}
    for number, spine in enumerate(spines):
        first = spine.ends[0].node
        is_single = len(spine.ends) == 1 and not spine.branches
        key = (first.fork, first.role, first.is_committed) if is_single else (number,)
        if key in found:
            found[key] = Spine(ends=[*found[key].ends, *spine.ends], is_joined=True)
        else:
            found[key] = spine
    return list(found.values())


def _next_of(children: Sequence[NodeEnd]) -> NodeEnd | None:
    """The child that the spine goes on with: the last standing one of the same role."""
    for end in reversed(children):
        node = end.node
        is_same = node.parent is not None and node.role is node.parent.role
        if is_same and node.is_standing and node.fork not in BEGINNINGS:
            return end
    return None
