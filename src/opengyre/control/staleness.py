"""Which ready groups an open step may take: oldest first, deadlines kept (rule 5).

Owns: the earliest-deadline test. Must not know: groups' members, steps' commands, time.
A group of version v must be taken by a step of version <= v + max_staleness. With P places left
in the open step (version V) and B in each later one, all of version <= v still fit iff their
number is at most P + slack * B, slack = v + max_staleness - V. Taking one group newer than v
costs such a place, so at most P + slack * B - num(<= v) newer ones may be taken.
At a boundary P = B, V = v and at most Q = `quota.most_outstanding` groups are there, so all of them
fit iff Q <= (max_staleness + 1) B, which the config demands. From then on the inequality stays true
for each v: what is taken of <= v lowers both sides, what is newer is bounded as above, a void,
filtered or dropped group lowers the left side alone, and the next step trades one slack for its B
places (a step closes with places left only if nothing is left).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.control.ids import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLoad:
    """Groups of one version that no step holds: `ready` in dispatch order, and the live ones."""

    version: int
    ready: tuple[GroupId, ...]
    num_live: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    step_version: int
    num_places: int
    places_per_step: int
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`groups` may be taken in this order; `blocked_by` is the version the others wait for."""

    groups: tuple[GroupId, ...]
    blocked_by: int | None


def choose(loads: Sequence[VersionLoad], places: Places) -> Choice:
    """Take oldest version first while every older group can still meet its deadline.

    `loads` are sorted by version. Any subset of the choice keeps the deadlines as well.
    """
    chosen: list[GroupId] = []
    num_older = 0
    limits: list[tuple[int, int]] = []
    for load in loads:
        allowed, blocker = _allowed(limits, len(chosen))
        num_taken = min(len(load.ready), places.num_places - len(chosen), allowed)
        chosen.extend(load.ready[:num_taken])
        if num_taken < len(load.ready):
            is_full = len(chosen) >= places.num_places
            return Choice(groups=tuple(chosen), blocked_by=None if is_full else blocker)
        num_older += len(load.ready) + load.num_live
        slack = load.version + places.max_staleness - places.step_version
        spare = places.num_places + slack * places.places_per_step - num_older
        limits.append((len(chosen) + max(0, spare), load.version))
    return Choice(groups=tuple(chosen), blocked_by=None)


def _allowed(limits: list[tuple[int, int]], num_chosen: int) -> tuple[int, int | None]:
    if not limits:
        return 1 << 30, None
    limit, version = min(limits)
    return max(0, limit - num_chosen), version
