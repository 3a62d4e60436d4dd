"""Which sampled ids a run trained, turn by turn, from what its accepted steps told.

Must not know: output, rewards. Invariants: a range is of the ids that one turn sampled; a path
that is no recorded turn's gives nothing (`gyre run verify` names it).
"""

from collections.abc import Iterable
from pathlib import Path

from opengyre.gateway.turns import Node
from opengyre.store.journal import read_journal
from opengyre.store.observations import PathDigest
from opengyre.views.check_steps import ExactlyOnce
from opengyre.views.run_state import RunState

Range = tuple[int, int]
Nodes = dict[tuple[str, int | None], Node]
"""By turn and attempt; None is the attempt that stands."""


def trained_paths(db: Path) -> dict[str, list[PathDigest]]:
    """By execution, those of accepted steps. Raises ConfigError, BoundaryError."""
    steps, nothing = ExactlyOnce(), RunState()
    for row in read_journal(db):
        steps.see(row, nothing)
    found: dict[str, list[PathDigest]] = {}
    for micro_step in steps.accepted():
        for path in micro_step.paths:
            if path.trained:
                found.setdefault(path.execution, []).append(path)
    return found


def trained_ranges(paths: Iterable[PathDigest], nodes: Nodes) -> dict[str, list[Range]]:
    """By turn, [start, end) of its completion ids. `nodes` are committed."""
    found: dict[str, list[Range]] = {}
    for path in paths:
        node = nodes.get((path.turn, None))
        room = path.num_tokens
        while node is not None:
            begin, end = node.num_tokens - len(node.completion), min(node.num_tokens, room)
            own = [(max(a, begin) - begin, min(b, end) - begin) for a, b in path.trained]
            found.setdefault(node.turn, []).extend(one for one in own if one[0] < one[1])
            room, node = min(room, node.num_kept), node.parent
    return {turn: sorted(ranges) for turn, ranges in found.items()}
