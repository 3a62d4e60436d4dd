"""What a step tells of the groups that it consumed: rewards, and where their tokens went.

Must not know: how a step runs. Invariant: means are over members with a verdict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from opengyre.runtime.book import Execution
from opengyre.runtime.trained_groups import TrainedGroups
from opengyre.store.observations import CellWork, MemberAccount
from opengyre.trainer.stream import StepStream
from opengyre.trajectory.account import Reason, mask_trained
from opengyre.trajectory.groups import Settled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """`mean_reward` of raw rewards, `mean_shaped` of what advantages are taken of."""

    mean_reward: float | None
    mean_shaped: float | None
    watched_share: float | None
    members: list[MemberAccount]
    num_no_variance: int


def figures_of(groups: TrainedGroups, names: Sequence[str], is_applied: bool) -> StepFigures:
    """`is_applied`: the update was made; else what was to be trained is masked."""
    members = [told for name in names for told in _members_of(groups, name, is_applied)]
    return StepFigures(
        mean_reward=_mean(one.reward for one in members),
        mean_shaped=_mean(one.shaped for one in members),
        watched_share=_watched_share([groups.executions_of(name) for name in names]),
        members=members,
        num_no_variance=sum(not groups.group(name).has_gradient for name in names),
    )


def work_of(stream: StepStream) -> dict[str, CellWork]:
    """What each cell did that was ever in the step, by name."""
    return {
        f"c{cell}": CellWork(
            num_claimed=told.num_claimed,
            num_done=told.num_done,
            num_tokens=told.num_tokens_done,
            num_returned=told.num_returned,
            num_refused=told.num_refused,
        )
        for cell, told in stream.all_counters()
    }


def _members_of(groups: TrainedGroups, name: str, is_applied: bool) -> list[MemberAccount]:
    told = zip(groups.executions_of(name), groups.group(name).members, strict=True)
    return [_member(one, member, is_applied) for one, member in told]


def _member(one: Execution, told: Settled, is_applied: bool) -> MemberAccount:
    account = told.account
    if not is_applied:
        account = mask_trained(account, Reason.NOT_APPLIED)
    return MemberAccount(
        execution=one.execution,
        reward=one.reward,
        shaped=told.reward,
        advantage=told.advantage,
        sampled=account.sampled,
        trained=account.trained,
        masked=dict(account.masked),
        dropped=dict(account.dropped),
    )


def _watched_share(groups: Iterable[Sequence[Execution]]) -> float | None:
    """Of the members with the best raw reward of their group, the share with a watched call."""
    best: list[Execution] = []
    for members in groups:
        rewards = [one.reward for one in members if one.reward is not None]
        best += [one for one in members if rewards and one.reward == max(rewards)]
    return _mean(any(turn.num_watched_calls for turn in one.turns) for one in best)


def _mean(values: Iterable[float | None]) -> float | None:
    valid = [value for value in values if value is not None]
    return fmean(valid) if valid else None
