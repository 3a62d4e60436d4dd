"""A user's transform in a whole run: raw rewards for people, shaped ones for the advantage."""

import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from run_rig import Driven, drive, make_trails

from opengyre.control import facts as f
from opengyre.runtime.run import Run
from opengyre.store.observations import EvalResult, MemberAccount, StepReport, TurnRecorded
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(180)

SHORT = ("run.num_steps=2", "schedule.run_ahead=0", "schedule.max_staleness=1")
PRICE = 0.01
LONG_TOKENS = 50
VERY_LONG_TOKENS = 80
UNLUCKY_TURNS = 13
TURNS_COST = f"""
def shape(reward, stats):
    return reward - {PRICE} * stats.num_turns
"""
FAILS_SOMETIMES = f"""
def shape(reward, stats):
    if stats.num_turns == {UNLUCKY_TURNS}:
        raise LookupError("not with me")
    return reward
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 tasks in `train`, 2 in `eval`."""
    train = make_trails(tmp_path_factory.mktemp("tasks") / "train", 10)
    held_out = train.with_name("eval")
    held_out.mkdir()
    for task in sorted(train.iterdir())[:2]:
        shutil.move(task, held_out / task.name)
    return train.parent


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Driven:
    folder = tmp_path_factory.mktemp("priced")
    (folder / "price.py").write_text(TURNS_COST)
    return drive(
        folder,
        tasks / "train",
        *SHORT,
        f'reward.transforms=["{folder}/price.py:shape"]',
        f'eval={{path="{tasks}/eval"}}',
        "training.overlong=mask",
        f"training.overlong_tokens={LONG_TOKENS}",
    )


def num_turns(driven: Driven) -> Counter[str]:
    told = {one.turn.turn: one.turn for one in driven.all(TurnRecorded) if one.turn.is_committed}
    return Counter(turn.execution for turn in told.values())


def num_tokens(driven: Driven) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in driven.all(TurnRecorded):
        found[one.turn.execution] += one.turn.num_completion_tokens * one.turn.is_committed
    return found


def members(driven: Driven) -> list[MemberAccount]:
    return [one for step in driven.all(StepReport) for one in step.members]


def verdicts(driven: Driven) -> dict[str, f.VerdictGiven]:
    return {fact.execution: fact for fact in driven.all(f.VerdictGiven)}


def assert_verified(driven: Driven) -> None:
    results = verify_run(open_run_folder(driven.end.folder))
    assert not [problem for result in results for problem in result.problems]


def test_each_trained_verdict_has_its_raw_and_its_shaped_reward(priced: Driven) -> None:
    assert priced.end.exit_code == 0
    turns, found = num_turns(priced), verdicts(priced)
    assert len(members(priced)) == 2 * 4 * 4
    for one in members(priced):
        fact = found[one.execution]
        assert fact.reward is not None
        assert fact.shaped == pytest.approx(fact.reward - PRICE * turns[one.execution])
        assert (one.reward, one.shaped) == (fact.reward, fact.shaped)


def test_evaluations_and_the_mean_of_a_step_are_of_raw_rewards(priced: Driven) -> None:
    evals, found = priced.all(EvalResult), verdicts(priced)
    assert len(evals) == 2
    of_eval = [found[name] for name in found if name not in {m.execution for m in members(priced)}]
    assert len(of_eval) == 2 * 2
    assert all(fact.shaped is None and not fact.exclusion for fact in of_eval)
    told = Counter(reward for one in evals for reward in one.rewards)
    assert told == Counter(fact.reward for fact in of_eval)
    for step in priced.all(StepReport):
        assert step.mean_reward == pytest.approx(fmean(m.reward for m in step.members))
        assert step.mean_shaped == pytest.approx(fmean(m.shaped for m in step.members))
        assert step.mean_shaped < step.mean_reward


def test_advantages_are_of_shaped_rewards(priced: Driven) -> None:
    """Members come group by group, 4 at a time; masked ones are in the mean."""
    found = members(priced)
    for start in range(0, len(found), 4):
        group = found[start : start + 4]
        mean = fmean(one.shaped for one in group if one.shaped is not None)
        for one in group:
            assert one.shaped is not None
            assert one.advantage is not None
            above = one.shaped - mean
            assert (abs(one.advantage) < 1e-6) == (abs(above) < 1e-6)
            assert one.advantage * above >= 0


def test_overlong_executions_are_masked_whole_and_no_other_is(priced: Driven) -> None:
    tokens = num_tokens(priced)
    masked = {one.execution for one in members(priced) if "overlong" in one.masked}
    longer = {one.execution for one in members(priced) if tokens[one.execution] > LONG_TOKENS}
    assert masked == longer
    assert 0 < len(masked) < len(members(priced))
    for one in members(priced):
        if one.execution in masked:
            assert one.trained == 0
            assert sum(one.masked.values()) + sum(one.dropped.values()) == one.sampled
    assert_verified(priced)


def test_members_that_are_dropped_or_not_shaped_take_no_part_and_it_is_told_once(
    tmp_path: Path, tasks: Path
) -> None:
    (tmp_path / "fails.py").write_text(FAILS_SOMETIMES)
    target = f"{tmp_path}/fails.py:shape"
    watched: list[Run] = []

    async def keep(run: Run) -> None:
        watched.append(run)

    driven = drive(
        tmp_path,
        tasks / "train",
        *SHORT,
        f'reward.transforms=["{target}"]',
        "training.overlong=drop",
        f"training.overlong_tokens={VERY_LONG_TOKENS}",
        watch=keep,
    )
    assert driven.end.exit_code == 0
    turns, tokens = num_turns(driven), num_tokens(driven)
    failed = f"no_shaped_reward: {target} raised LookupError: not with me"
    for name, fact in verdicts(driven).items():
        words = failed if turns[name] == UNLUCKY_TURNS else ""
        assert fact.exclusion == ("overlong" if tokens[name] > VERY_LONG_TOKENS else words)
        assert fact.reward is not None
    excluded = {fact.execution for fact in verdicts(driven).values() if fact.exclusion}
    reasons = {reason for one in members(driven) for reason in one.dropped}
    assert reasons >= {"no_shaped_reward", "overlong"}
    for one in members(driven):
        if one.execution in excluded:
            assert (one.shaped, one.advantage, one.trained) == (None, None, 0)
            assert sum(one.dropped.values()) == one.sampled
        else:
            assert one.advantage is not None
    assert len([words for _, words in watched[0].notes if "not with me" in words]) == 1
    assert_verified(driven)
