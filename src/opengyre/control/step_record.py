"""One open step: its lifecycle, its groups, its members.

Owns: StepState, its transition table, StepRecord, Redo. Must not know: when a step opens or
closes.
Invariants: every assigned group was offered; offered and assigned never exceed B together; a
redo takes its fixed groups.
"""

from dataclasses import dataclass, field
from enum import Enum

from opengyre.control.errors import InvariantError
from opengyre.control.groups import Group
from opengyre.control.ids import CommandId, GroupId


class StepState(Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"


STEP_TRANSITIONS: dict[StepState, frozenset[StepState]] = {
    StepState.OPENING: frozenset({StepState.OPEN}),
    StepState.OPEN: frozenset({StepState.CLOSING}),
    StepState.CLOSING: frozenset(),
}


class MemberState(Enum):
    ADMITTING = "admitting"
    ADMITTED = "admitted"
    DROPPED = "dropped"


MEMBER_TRANSITIONS: dict[MemberState, frozenset[MemberState]] = {
    MemberState.ADMITTING: frozenset({MemberState.ADMITTED, MemberState.DROPPED}),
    MemberState.ADMITTED: frozenset({MemberState.DROPPED}),
    MemberState.DROPPED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """Groups a step must take again after the core's death; exact: these and no others."""

    groups: tuple[Group, ...]
    is_exact: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A satellite of the step; it is dropped if it has not joined at `deadline_s`. `admit` and
    `drop` are the commands that asked for it."""

    cell: int
    deadline_s: float
    admit: CommandId
    state: MemberState = MemberState.ADMITTING
    drop_reason: str = ""
    drop: CommandId | None = None
    num_drop_failures: int = 0

    def move(self, state: MemberState) -> None:
        if state not in MEMBER_TRANSITIONS[self.state]:
            raise InvariantError(f"member {self.cell}: {self.state.value} -> {state.value}")
        self.state = state


@dataclass(slots=True, kw_only=True, eq=False)
class StepRecord:
    """`offered` holds every unassigned group given to the stream, `told` those of them it was told;
    `revision` is that of the group book when the offer was last looked at. `fixed` groups (of a
    redo) come first; with `is_exact` no others follow."""

    step: int
    version: int
    fixed: tuple[Group, ...] | None
    is_exact: bool
    state: StepState = StepState.OPENING
    assigned: dict[GroupId, Group] = field(default_factory=dict)
    offered: dict[GroupId, Group] = field(default_factory=dict)
    told: dict[GroupId, None] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    revision: int = -1
    blocked_by: int | None = None
    members_by_state: dict[MemberState, dict[int, Member]] = field(
        default_factory=lambda: {state: {} for state in MemberState}
    )

    def add_member(self, member: Member) -> None:
        self.members[member.cell] = member
        self.members_by_state[member.state][member.cell] = member

    def move_member(self, member: Member, state: MemberState) -> None:
        del self.members_by_state[member.state][member.cell]
        member.move(state)
        self.members_by_state[state][member.cell] = member

    @property
    def next_to_join(self) -> Member | None:
        """The one that must join first: all have the same time, so the first that was asked."""
        return next(iter(self.members_by_state[MemberState.ADMITTING].values()), None)

    def move(self, state: StepState) -> None:
        if state not in STEP_TRANSITIONS[self.state]:
            raise InvariantError(f"step {self.step}: {self.state.value} -> {state.value}")
        self.state = state
