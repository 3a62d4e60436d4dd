"""The training rows of one group: its valid members' paths with their advantage.

Must not know steps, cells or storage. Invariants: T_e sums T_j over the execution's rows; rows
keep member order, then path order; an execution without a verdict gives no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.trajectory.advantages import Baseline, group_advantages
from opengyre.trajectory.rows import Path, Reason, TokenAccount, drop_all, mask_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One closed execution; `reward` None is no verdict."""

    execution: str
    reward: float | None
    paths: Sequence[Path]
    account: TokenAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One path to train: A_e, T_j and T_e beside it.

    `is_counted_only`: its gradient is zero for certain (no variance in its group), so it is not
    computed, but its execution counts in the step's divisor.
    """

    group: str
    execution: str
    path: Path
    advantage: float
    num_path_tokens: int
    num_execution_tokens: int
    is_counted_only: bool

    @property
    def cost_tokens(self) -> int:
        """Tokens that go through the model for it."""
        return 0 if self.is_counted_only else len(self.path.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    group: str
    rows: tuple[Row, ...]
    account: TokenAccount
    num_valid: int
    has_gradient: bool


def rows_of_group(
    group: str, members: Sequence[Member], *, baseline: Baseline, eps: float = 1e-6
) -> GroupRows:
    """Rows in member order, and the account of all its members' tokens."""
    advantages = group_advantages([member.reward for member in members], baseline=baseline, eps=eps)
    rows: list[Row] = []
    account = TokenAccount()
    for member, advantage in zip(members, advantages.values, strict=True):
        if advantage is None:
            account += drop_all(member.account, Reason.NO_VERDICT)
            continue
        rows += _rows_of_member(group, member, advantage, advantages.has_gradient)
        if advantages.has_gradient:
            account += member.account
        else:
            account += mask_trained(member.account, Reason.NO_VARIANCE)
    return GroupRows(
        group=group,
        rows=tuple(rows),
        account=account,
        num_valid=advantages.num_valid,
        has_gradient=advantages.has_gradient,
    )


def _rows_of_member(group: str, member: Member, advantage: float, has_gradient: bool) -> list[Row]:
    num_execution_tokens = sum(path.num_trained_tokens for path in member.paths)
    return [
        Row(
            group=group,
            execution=member.execution,
            path=path,
            advantage=advantage,
            num_path_tokens=path.num_trained_tokens,
            num_execution_tokens=num_execution_tokens,
            is_counted_only=not has_gradient,
        )
        for path in member.paths
        if path.num_trained_tokens > 0
    ]
