"""The training rows of one group: its members' selected paths with their advantage.

Must not know steps, cells or storage. Invariants: T_e sums T_j over the execution's rows; a row
is in one bundle; a bundle's rows are one execution's; bundles keep member order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opengyre.trajectory.account import Reason, TokenAccount, drop_all, mask_trained
from opengyre.trajectory.advantages import Baseline, group_advantages
from opengyre.trajectory.bundles import Bundle, Layout, Row, bundles_of
from opengyre.trajectory.selection import Selection, SelectionSettings, select
from opengyre.trajectory.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One closed execution. `reward` is the shaped one, None if it takes no part for `exclusion`.
    With `masked` it stays in the baseline and none of its tokens is trained. `seed` draws its
    paths."""

    execution: str
    tree: Tree
    reward: float | None
    seed: int
    exclusion: Reason = Reason.NO_VERDICT
    masked: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """`budget_tokens` bounds a bundle unless one path alone is longer."""

    selection: SelectionSettings
    baseline: Baseline
    eps: float
    layout: Layout
    budget_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What became of one member. `advantage` None: it takes no part."""

    execution: str
    reward: float | None
    advantage: float | None
    account: TokenAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    group: str
    bundles: tuple[Bundle, ...]
    members: tuple[Settled, ...]
    has_gradient: bool

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for bundle in self.bundles for row in bundle.rows)


def rows_of_group(group: str, members: Sequence[Member], *, settings: GroupSettings) -> GroupRows:
    """Bundles in member order, and the account of each member. The same input gives the same."""
    advantages = group_advantages(
        [member.reward for member in members], baseline=settings.baseline, eps=settings.eps
    )
    bundles: list[Bundle] = []
    accounts: list[Settled] = []
    for member, advantage in zip(members, advantages.values, strict=True):
        selection = select(
            member.tree, settings=settings.selection, rng=np.random.default_rng(member.seed)
        )
        is_trained = advantage is not None and member.masked is None
        if advantage is not None and is_trained:
            rows = _rows_of_member(
                group, member, selection, advantage=advantage, has_gradient=advantages.has_gradient
            )
            bundles += bundles_of(
                rows, layout=settings.layout, budget_tokens=settings.budget_tokens
            )
        account = _account_of(member, selection, advantage, has_gradient=advantages.has_gradient)
        accounts.append(
            Settled(
                execution=member.execution,
                reward=member.reward,
                advantage=advantage,
                account=account,
            )
        )
    return GroupRows(
        group=group,
        bundles=tuple(bundles),
        members=tuple(accounts),
        has_gradient=advantages.has_gradient,
    )


def _account_of(
    member: Member, selection: Selection, advantage: float | None, *, has_gradient: bool
) -> TokenAccount:
    if advantage is None:
        return drop_all(selection.account, member.exclusion)
    if member.masked is not None:
        return mask_trained(selection.account, member.masked)
    return (
        selection.account if has_gradient else mask_trained(selection.account, Reason.NO_VARIANCE)
    )


def _rows_of_member(
    group: str, member: Member, selection: Selection, *, advantage: float, has_gradient: bool
) -> list[Row]:
    return [
        Row(
            group=group,
            execution=member.execution,
            path=path,
            advantage=advantage,
            num_execution_tokens=selection.account.trained,
            is_counted_only=not has_gradient,
        )
        for path in selection.paths
    ]
