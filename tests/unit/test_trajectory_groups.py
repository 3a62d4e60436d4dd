"""Rows of a group: advantages, T_j and T_e, what becomes of members that take no part."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from opengyre.seams.cells import MicroStep
from opengyre.trainer.wire import execution_share, micro_step
from opengyre.trajectory.account import Reason, TokenAccount
from opengyre.trajectory.advantages import Baseline, group_advantages
from opengyre.trajectory.bundles import Bundle, Layout, Row
from opengyre.trajectory.groups import GroupRows, GroupSettings, Member, rows_of_group
from opengyre.trajectory.selection import SelectionSettings, select
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import ForkReason, Role, SampledSpan, TurnTokens
from tests.unit.trajectory_worlds import Seen, Token, made_world, tree_of

SETTINGS = GroupSettings(
    selection=SelectionSettings(max_paths=3),
    baseline=Baseline.MEAN_STD,
    eps=1e-6,
    layout=Layout.TREE,
    budget_tokens=60,
)
REWARDS = [1.0, 0.0, None, 0.25, 0.5]


def members_of(seed: int, rewards: Sequence[float | None]) -> tuple[list[Member], list[list[Seen]]]:
    seen = [made_world(10 * seed + k).seen for k in range(len(rewards))]
    members = [
        Member(execution=f"e{k}", tree=tree_of(seen[k]), reward=reward, seed=100 * seed + k)
        for k, reward in enumerate(rewards)
    ]
    return members, seen


def turn(number: int, num_sampled: int, *, parent: int = 0, kept: int = 0) -> TurnTokens:
    return TurnTokens(
        turn=f"e1.t{number}",
        attempt=0,
        parent=f"e1.t{parent}" if parent else "",
        fork_reason=ForkReason.REWRITTEN_TURN if parent else ForkReason.NONE,
        role=Role.MAIN,
        is_committed=True,
        num_kept_tokens=kept,
        new_prompt_ids=[7, 8],
        completion_ids=list(range(num_sampled)),
        logprobs=[-0.5] * num_sampled,
        spans=(SampledSpan(start=0, end=num_sampled, version=1, engine="cell-1"),),
    )


def tree(*turns: TurnTokens) -> Tree:
    grown = Tree()
    for one in turns:
        grown.insert(one)
    return grown


def forked() -> Tree:
    """Three tokens and, after the first of them, three others: paths of 3 + 3 or 2 + 4 tokens."""
    return tree(turn(1, 3), turn(2, 3, parent=1, kept=3))


def member(name: str, reward: float | None, **changes: object) -> Member:
    made = Member(execution=name, tree=forked(), reward=reward, seed=1)
    return replace(made, **changes)  # type: ignore[arg-type]


def account_of(rows: GroupRows, name: str) -> TokenAccount:
    return next(one.account for one in rows.members if one.execution == name)


@pytest.mark.parametrize("baseline", list(Baseline))
def test_each_row_has_its_execution_s_advantage_and_total_and_its_own_number_of_tokens(
    baseline: Baseline,
) -> None:
    for seed in range(6):
        members, _ = members_of(seed, REWARDS)
        got = rows_of_group("g", members, settings=replace(SETTINGS, baseline=baseline))
        wanted = group_advantages(REWARDS, baseline=baseline, eps=1e-6).values
        assert [one.advantage for one in got.members] == list(wanted)
        assert [one.reward for one in got.members] == REWARDS
        by_execution: dict[str, list[Row]] = {}
        for row in got.rows:
            by_execution.setdefault(row.execution, []).append(row)
        for one, advantage in zip(got.members, wanted, strict=True):
            rows = by_execution.get(one.execution, [])
            assert {row.advantage for row in rows} <= {advantage}
            assert {row.group for row in rows} <= {"g"}
            assert not any(row.is_counted_only for row in rows)
            trained = [sum(end - begin for begin, end in row.path.trained) for row in rows]
            assert [row.num_path_tokens for row in rows] == trained
            assert {row.num_execution_tokens for row in rows} <= {sum(trained)}
            assert one.account.trained == sum(trained)


def test_rows_are_the_paths_that_are_drawn_by_the_members_seeds_each_in_one_bundle() -> None:
    for seed in range(6):
        members, _ = members_of(seed, REWARDS)
        got = rows_of_group("g", members, settings=SETTINGS)
        wanted = Counter(
            (one.execution, path.leaf.index, path.trained)
            for one in members
            if one.reward is not None
            for path in select(
                one.tree, settings=SETTINGS.selection, rng=np.random.default_rng(one.seed)
            ).paths
        )
        rows = [row for bundle in got.bundles for row in bundle.rows]
        told = Counter((row.execution, row.path.leaf.index, row.path.trained) for row in rows)
        assert told == wanted
        assert list(got.rows) == rows
        assert all(len({row.execution for row in one.rows}) == 1 for one in got.bundles)
        names = [row.execution for row in rows]
        assert names == sorted(names)


def test_the_same_members_give_the_same_rows_whatever_was_asked_before() -> None:
    for layout in Layout:
        members, seen = members_of(3, REWARDS)
        settings = replace(SETTINGS, layout=layout)
        first = rows_of_group("g", members, settings=settings)
        assert rows_of_group("g", members, settings=settings) == first
        again = [replace(one, tree=tree_of(own)) for one, own in zip(members, seen, strict=True)]
        other = rows_of_group("g", again, settings=settings)
        assert other.members == first.members
        assert [drawn_of(bundle) for bundle in other.bundles] == [
            drawn_of(bundle) for bundle in first.bundles
        ]


def drawn_of(bundle: Bundle) -> list[tuple[str, str, object, float]]:
    return [
        (row.execution, row.path.leaf.turn, row.path.trained, row.advantage) for row in bundle.rows
    ]


def test_another_seed_of_a_member_changes_its_own_rows_only() -> None:
    changed: set[str] = set()
    for seed in range(8):
        members, _ = members_of(seed, REWARDS)
        reseeded = [members[0], replace(members[1], seed=999), *members[2:]]
        first, other = (rows_of_group("g", one, settings=SETTINGS) for one in (members, reseeded))
        before, after = ([drawn_of(one) for one in rows.bundles] for rows in (first, other))
        changed |= {one[0][0] for one in before if one not in after}
    assert changed == {"e1"}


@pytest.mark.parametrize(
    "reason", [Reason.NO_VERDICT, Reason.OVERLONG, Reason.TRUNCATED, Reason.NO_SHAPED_REWARD]
)
def test_a_member_without_a_value_is_dropped_for_its_reason_and_moves_no_mean(
    reason: Reason,
) -> None:
    left = member("c", None, exclusion=reason)
    got = rows_of_group("g", [member("a", 1.0), left, member("b", 0.0)], settings=SETTINGS)
    assert {row.execution for row in got.rows} == {"a", "b"}
    assert [one.advantage for one in got.members] == [
        pytest.approx(1, abs=1e-4),
        None,
        pytest.approx(-1, abs=1e-4),
    ]
    assert account_of(got, "c") == TokenAccount(sampled=6, dropped={str(reason): 6})


def test_a_masked_member_stays_in_the_baseline_and_trains_nothing() -> None:
    long = member("c", 1.0, masked=Reason.OVERLONG)
    settings = replace(SETTINGS, baseline=Baseline.MEAN)
    got = rows_of_group("g", [member("a", 0.5), long, member("b", 0.0)], settings=settings)
    assert {row.execution for row in got.rows} == {"a", "b"}
    assert [one.advantage for one in got.members] == [0.0, 0.5, -0.5]
    assert account_of(got, "c") == TokenAccount(sampled=6, masked={"overlong": 6})
    assert account_of(got, "a") == TokenAccount(sampled=6, trained=6)


def test_what_was_not_trainable_before_keeps_its_reason_when_a_member_is_masked_or_dropped() -> (
    None
):
    cut = replace(turn(3, 4, parent=1, kept=5), is_committed=False)
    side = replace(turn(4, 2), role=Role.SIDE)
    grown = tree(turn(1, 3), cut, side)
    masked = member("a", 1.0, tree=grown, masked=Reason.TRUNCATED)
    dropped = member("b", None, tree=grown)
    got = rows_of_group("g", [masked, dropped, member("c", 0.0)], settings=SETTINGS)
    assert account_of(got, "a") == TokenAccount(
        sampled=9, masked={"truncated": 3, "untrained_role": 2}, dropped={"not_committed": 4}
    )
    assert account_of(got, "b") == TokenAccount(
        sampled=9, dropped={"no_verdict": 5, "not_committed": 4}
    )


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [0.5, None, None], [0.1 + 0.2, 0.3, None]])
def test_a_group_without_variance_is_counted_and_masked(rewards: list[float | None]) -> None:
    members = [member(f"e{k}", reward) for k, reward in enumerate(rewards)]
    got = rows_of_group("g", members, settings=SETTINGS)
    assert not got.has_gradient
    assert all(row.is_counted_only and row.advantage == 0.0 for row in got.rows)
    valid = [one.execution for one in members if one.reward is not None]
    assert sorted({row.execution for row in got.rows}) == valid
    assert execution_sum(got.rows) == pytest.approx(len(valid))
    for name in valid:
        assert account_of(got, name) == TokenAccount(sampled=6, masked={"no_variance": 6})


def execution_sum(rows: Sequence[Row]) -> float:
    return sum(row.num_path_tokens / row.num_execution_tokens for row in rows)


def test_an_execution_with_nothing_to_train_is_in_the_baseline_and_in_no_row() -> None:
    side = tree(replace(turn(1, 3), role=Role.SIDE))
    members = [member("a", 1.0, tree=side), member("b", 0.0), member("c", 0.5, tree=Tree())]
    settings = replace(SETTINGS, baseline=Baseline.MEAN)
    got = rows_of_group("g", members, settings=settings)
    assert {row.execution for row in got.rows} == {"b"}
    assert [one.advantage for one in got.members] == [0.5, -0.5, 0.0]
    assert account_of(got, "a") == TokenAccount(sampled=3, masked={"untrained_role": 3})
    assert account_of(got, "c") == TokenAccount()


def test_the_accounts_of_a_group_are_balanced_and_sum_to_all_that_was_sampled() -> None:
    reasons = (None, Reason.OVERLONG, Reason.TRUNCATED)
    for seed in range(10):
        rng = random.Random(seed)
        rewards = [rng.choice([None, 0.0, 0.5, 1.0]) for _ in range(5)]
        members, seen = members_of(seed, rewards)
        members = [replace(one, masked=rng.choice(reasons)) for one in members]
        got = rows_of_group("g", members, settings=SETTINGS)
        assert [one.execution for one in got.members] == [one.execution for one in members]
        assert all(one.account.is_balanced for one in got.members)
        whole = sum((one.account for one in got.members), TokenAccount())
        assert whole.is_balanced
        assert whole.sampled == sum(len(one.sampled) for own in seen for one in own)
        computed = [row for row in got.rows if not row.is_counted_only]
        assert whole.trained == sum(row.num_path_tokens for row in computed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """A made-up loss of each token that depends, as a sequence ratio does, on its whole path."""

    seen: Mapping[str, Sequence[Seen]]

    def naive_mean(self, members: Sequence[Member], advantages: Sequence[float | None]) -> float:
        """DESIGN: mean over trainable tokens inside an execution, then over executions."""
        means = []
        for one, advantage in zip(members, advantages, strict=True):
            if advantage is None:
                continue
            rng = np.random.default_rng(one.seed)
            paths = select(one.tree, settings=SETTINGS.selection, rng=rng).paths
            losses = [
                advantage * loss
                for path in paths
                for loss in self.of(one.execution, path.leaf.index, path.trained)
            ]
            means += [sum(losses) / len(losses)] if losses else []
        return sum(means) / len(means)

    def of(self, execution: str, leaf: int, trained: Sequence[tuple[int, int]]) -> list[float]:
        origins = self.seen[execution][leaf].origins
        names = [origins[at].token for begin, end in trained for at in range(begin, end)]
        ratio = sum(self.value(name) for name in names) / len(names)
        return [ratio * self.value(name) for name in names]

    @staticmethod
    def value(name: Token) -> float:
        return random.Random(repr(name)).uniform(0.5, 1.5)


def test_sums_of_shares_over_any_micro_steps_are_the_mean_over_tokens_and_then_executions() -> None:
    for seed, layout in [(seed, layout) for seed in range(5) for layout in Layout]:
        members, seen = members_of(seed, REWARDS)
        losses = Losses(seen={one.execution: own for one, own in zip(members, seen, strict=True)})
        got = rows_of_group("g", members, settings=replace(SETTINGS, layout=layout))
        bundles = list(got.bundles)
        random.Random(seed).shuffle(bundles)
        cuts = sorted({0, len(bundles) // 3, len(bundles) // 2, len(bundles)})
        loss_sum, num_executions = 0.0, 0.0
        for begin, end in pairwise(cuts):
            step = micro_step(bundles[begin:end], step=1, number=begin, version=1)
            loss_sum += streamed(step, losses, bundles[begin:end])
            num_executions += execution_share(step)
        advantages = [one.advantage for one in got.members]
        assert num_executions == pytest.approx(len({row.execution for row in got.rows}))
        assert loss_sum / num_executions == pytest.approx(
            losses.naive_mean(members, advantages), rel=1e-12
        )


def streamed(step: MicroStep, losses: Losses, bundles: Sequence[Bundle]) -> float:
    """The sum of A l / T_e over the trained tokens, all but the leaf read from the wire."""
    rows = [row for bundle in bundles for row in bundle.rows]
    total = 0.0
    for path, row in zip(step.paths, rows, strict=True):
        assert (path.execution, path.turn) == (row.execution, row.path.leaf.turn)
        places = [at for begin, end in path.pieces for at in range(begin, end)]
        flat = [at for begin, end in path.trained for at in range(begin, end)]
        depths = [places.index(at) for at in flat]
        own = losses.of(path.execution, row.path.leaf.index, [(at, at + 1) for at in depths])
        total += sum(path.advantage * loss / path.num_execution_tokens for loss in own)
    return total
