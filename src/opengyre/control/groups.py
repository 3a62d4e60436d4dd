"""Groups: their lifecycle, and who is live, ready, assigned.

Owns: GroupState, its transition table, the book of groups with O(1) counts. Must not know:
steps, engines' capacity, time.
Invariants: every group is counted in exactly one state; a finished group leaves the book once
its consumption is durable.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from opengyre.control.errors import InvariantError
from opengyre.control.ids import EngineId, ExecutionId, GroupId


class GroupState(Enum):
    LIVE = "live"
    READY = "ready"
    ASSIGNED = "assigned"
    CONSUMED = "consumed"
    VOID = "void"
    FILTERED = "filtered"
    DROPPED = "dropped"


GROUP_TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.LIVE: frozenset(
        {GroupState.READY, GroupState.VOID, GroupState.FILTERED, GroupState.DROPPED}
    ),
    GroupState.READY: frozenset({GroupState.ASSIGNED, GroupState.DROPPED}),
    GroupState.ASSIGNED: frozenset({GroupState.READY, GroupState.CONSUMED}),
    GroupState.CONSUMED: frozenset({GroupState.READY}),
    GroupState.VOID: frozenset(),
    GroupState.FILTERED: frozenset(),
    GroupState.DROPPED: frozenset(),
}


OVER = (GroupState.VOID, GroupState.FILTERED, GroupState.DROPPED)
MIN_SPREAD = 1e-8


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """`number` is its place in dispatch order; `num_open` members have no verdict or are live.
    `lowest` and `highest` are the bounds of the valid members' values."""

    group: GroupId
    number: int
    version: int
    members: tuple[ExecutionId, ...]
    num_open: int
    num_valid: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    state: GroupState = GroupState.LIVE
    num_members_by_engine: dict[EngineId, int] = field(default_factory=dict)


def is_without_variance(lowest: float, highest: float) -> bool:
    """Values from `lowest` to `highest` give no advantage: their standard deviation is below half
    of MIN_SPREAD, and `trajectory.advantages` takes one below 1e-8 as none."""
    return highest - lowest < MIN_SPREAD


class GroupBook:
    """All groups that may still change, with counts and per-version indexes of the unassigned.

    `revision` grows when a step may take more than before: a group got ready, or a live one ended.
    """

    def __init__(self) -> None:
        self.by_id: dict[GroupId, Group] = {}
        self.num_by_state: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        self.num_void_in_a_row = 0
        self.revision = 0
        self._live_by_version: dict[int, dict[GroupId, Group]] = {}
        self._ready_by_version: dict[int, dict[GroupId, Group]] = {}

    @property
    def num_live(self) -> int:
        return self.num_by_state[GroupState.LIVE]

    @property
    def num_ready(self) -> int:
        return self.num_by_state[GroupState.READY]

    @property
    def num_outstanding(self) -> int:
        return self.num_live + self.num_ready + self.num_by_state[GroupState.ASSIGNED]

    def add(self, group: Group) -> None:
        self.by_id[group.group] = group
        self._enter(group)

    def move(self, group: Group, state: GroupState) -> None:
        if state not in GROUP_TRANSITIONS[group.state]:
            raise InvariantError(f"{group.group}: {group.state.value} -> {state.value}")
        self._leave(group)
        group.state = state
        self._enter(group)
        if state in OVER:
            del self.by_id[group.group]

    def member_done(
        self, group: Group, *, value: float | None, min_valid: int, is_filtering: bool
    ) -> None:
        """One member is closed and has its last word (`value` None: it is not valid); the last one
        decides ready, void or filtered."""
        group.num_open -= 1
        if value is not None:
            group.num_valid += 1
            group.lowest, group.highest = min(group.lowest, value), max(group.highest, value)
        if group.num_open > 0 or group.state is not GroupState.LIVE:
            return
        if group.num_valid < min_valid:
            self.num_void_in_a_row += 1
            self.move(group, GroupState.VOID)
            return
        self.num_void_in_a_row = 0
        is_filtered = is_filtering and is_without_variance(group.lowest, group.highest)
        self.move(group, GroupState.FILTERED if is_filtered else GroupState.READY)

    def forget(self, group: Group) -> None:
        """The group's consumption is durable; nothing can bring it back."""
        self.by_id.pop(group.group, None)

    def versions(self) -> list[int]:
        """Dispatch versions of unassigned groups, oldest first."""
        return sorted({*self._live_by_version, *self._ready_by_version})

    def live_of(self, version: int) -> Iterator[Group]:
        """Live groups of one version in dispatch order."""
        return iter(self._live_by_version.get(version, {}).values())

    def num_live_of(self, version: int) -> int:
        return len(self._live_by_version.get(version, {}))

    def ready_of(self, version: int) -> list[Group]:
        """Ready groups of one version in dispatch order."""
        found = self._ready_by_version.get(version, {}).values()
        return sorted(found, key=lambda group: group.number)

    def _enter(self, group: Group) -> None:
        self.revision += group.state not in (GroupState.ASSIGNED, GroupState.CONSUMED)
        self.num_by_state[group.state] += 1
        index = self._index(group.state)
        if index is not None:
            index.setdefault(group.version, {})[group.group] = group

    def _leave(self, group: Group) -> None:
        self.num_by_state[group.state] -= 1
        index = self._index(group.state)
        if index is None:
            return
        del index[group.version][group.group]
        if not index[group.version]:
            del index[group.version]

    def _index(self, state: GroupState) -> dict[int, dict[GroupId, Group]] | None:
        if state is GroupState.LIVE:
            return self._live_by_version
        if state is GroupState.READY:
            return self._ready_by_version
        return None
