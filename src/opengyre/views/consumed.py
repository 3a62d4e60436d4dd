"""What accepted steps tell of the executions they consumed.

Owns: who was consumed by which step, the told account of each, the reason of all others. Must not
know: tokens. Invariant: a step that was opened again counts by its last report alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opengyre.control.groups import GroupState
from opengyre.store import observations as seen
from opengyre.trajectory.account import DROPPING, Reason, TokenAccount
from opengyre.views.run_state import ExecutionView, RunState

STRUCTURAL = frozenset(map(str, DROPPING))
NOT_TOLD = "not_told"
"""In place of a reason: a run of an older version told no accounts."""


@dataclass(slots=True, kw_only=True)
class Consumed:
    """`step_by_execution`: members of the groups of accepted steps. `told`: their accounts.
    `unapplied`: steps without an update. `untold`: accepted steps that told no account."""

    step_by_execution: dict[str, int] = field(default_factory=dict)
    told: dict[str, list[seen.MemberAccount]] = field(default_factory=dict)
    unapplied: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)

    def account(self, execution: str) -> seen.MemberAccount | None:
        accounts = self.told.get(execution)
        return accounts[0] if accounts else None


def consumed_by(reports: Iterable[seen.StepReport], state: RunState) -> Consumed:
    """`reports` of accepted steps."""
    consumed = Consumed()
    for report in reports:
        members = [
            member
            for group in report.groups
            if group in state.groups
            for member in state.groups[group].members
        ]
        consumed.step_by_execution |= dict.fromkeys(members, report.step)
        for told in report.members:
            consumed.told.setdefault(told.execution, []).append(told)
        if not report.is_applied:
            consumed.unapplied.add(report.step)
        if members and not report.members:
            consumed.untold.add(report.step)
    return consumed


def told_account(told: seen.MemberAccount) -> TokenAccount:
    return TokenAccount(
        sampled=told.sampled, trained=told.trained, masked=told.masked, dropped=told.dropped
    )


def reason_apart(state: RunState, one: ExecutionView) -> Reason:
    """Why no step has consumed the execution."""
    if one.group is None:
        return Reason.EVALUATION
    match state.group_state(state.groups[one.group]):
        case GroupState.VOID:
            return Reason.VOID_GROUP
        case GroupState.FILTERED:
            return Reason.FILTERED_GROUP
        case _:
            return Reason.NOT_CONSUMED
