"""P11 and P12: a run with every kind of fork keeps them, and what breaks them is found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_tree import record_tree

from opengyre.control import facts as f
from opengyre.control.ids import execution_id, group_id
from opengyre.store import observations as seen
from opengyre.views.verify import Recorded
from tests.planting import Planting


@pytest.fixture
def run(tmp_path: Path) -> Planting:
    return Planting(rows=record_tree(tmp_path).rows, tokens=tmp_path)


def test_a_run_with_every_kind_of_fork_is_counted_to_the_last_token(run: Planting) -> None:
    results = run.results()
    assert {name: one.problems for name, one in results.items() if one.problems} == {}
    assert results["P11"].num_checked == results["P12"].num_checked == 5
    assert results["P11"].notes == (
        "137 tokens sampled = 70 trained + 24 masked + 43 dropped",
        "masked: 20 not_selected, 4 untrained_role",
        "dropped: 20 void_group, 10 evaluation, 10 relaunched, 3 not_committed",
    )


def change_account(run: Planting, number: int, **fields: Any) -> None:
    place = run.where(seen.StepReport)[0]
    value: Any = run.rows[place].value
    members = list(value.members)
    members[number] = msgspec.structs.replace(members[number], **fields)
    run.change(place, members=members)


def change_trained(run: Planting, turn: str, trained: list[tuple[int, int]]) -> None:
    """What the path to `turn` tells as trained."""
    place = run.where(seen.MicroStepDone)[0]
    value: Any = run.rows[place].value
    paths = [
        msgspec.structs.replace(one, trained=trained) if one.turn == turn else one
        for one in value.paths
    ]
    assert paths != value.paths
    run.change(place, paths=paths)


def change_verdict(run: Planting, number: int, **fields: Any) -> None:
    place = run.where(f.VerdictGiven, execution=execution_id(number))[0]
    value: Any = run.rows[place].value
    run.rows[place] = replace(run.rows[place], value=replace(value, **fields))


def not_balanced(run: Planting) -> None:
    change_account(run, 0, masked={"not_selected": 19, "untrained_role": 4})


def fewer_sampled_than_recorded(run: Planting) -> None:
    change_account(run, 0, sampled=96, masked={"not_selected": 19, "untrained_role": 4})


def more_told_than_trained(run: Planting) -> None:
    change_account(run, 0, trained=64, masked={"not_selected": 20})


def a_member_without_account(run: Planting) -> None:
    place = run.where(seen.StepReport)[0]
    value: Any = run.rows[place].value
    run.change(place, members=value.members[1:])


def two_accounts(run: Planting) -> None:
    place = run.where(seen.StepReport)[0]
    value: Any = run.rows[place].value
    run.change(place, members=[*value.members, value.members[1]])


def account_of_a_stranger(run: Planting) -> None:
    place = run.where(seen.StepReport)[0]
    value: Any = run.rows[place].value
    stranger = msgspec.structs.replace(value.members[1], execution=execution_id(3))
    run.change(place, members=[*value.members, stranger])


def trained_twice(run: Planting) -> None:
    change_trained(run, "e000001.t8", [(40, 50), (48, 50), (70, 80), (100, 110), (130, 140)])


def trained_once_more(run: Planting) -> None:
    place = run.where(seen.MicroStepDone)[0]
    value: Any = run.rows[place].value
    run.change(place, paths=[*value.paths, value.paths[0]])


def abandoned_attempt_trained(run: Planting) -> None:
    """The attempt that stood is told as never committed."""
    for name in ("e000001.t8", "e000001.t10"):
        place = next(n for n in run.where(seen.TurnRecorded) if run.turn(n).turn == name)
        run.change(place, turn=msgspec.structs.replace(run.turn(place), is_committed=False))


def earlier_launch_trained(run: Planting) -> None:
    """A launch that came later gives up all turns before it."""
    again = seen.LaunchRecorded(
        execution=execution_id(1), task="trail-1", group=group_id(1), launch_number=3
    )
    run.insert(run.where(f.ExecutionClosed, execution=execution_id(1))[0], again)


def evaluation_trained(run: Planting) -> None:
    place = run.where(seen.MicroStepDone)[0]
    value: Any = run.rows[place].value
    path = msgspec.structs.replace(
        value.paths[-1], execution=execution_id(5), turn=f"{execution_id(5)}.t1"
    )
    run.change(place, paths=[*value.paths, path])


def attempt_not_recorded(run: Planting) -> None:
    """The abandoned attempt is forgotten by the journal, not by the account."""
    run.drop(next(n for n in run.where(seen.TurnRecorded) if not run.turn(n).is_committed))


def dropped_for_a_reason_it_has_not(run: Planting) -> None:
    change_account(run, 1, trained=0, dropped={"no_verdict": 10}, advantage=None)


def dropped_for_another_reason_than_told(run: Planting) -> None:
    change_verdict(run, 2, exclusion="overlong")
    change_account(run, 1, trained=0, dropped={"truncated": 10}, advantage=None, shaped=None)


def refused_in_a_step_that_was_not(run: Planting) -> None:
    change_account(run, 1, trained=0, masked={"not_applied": 10})


def flat_in_a_group_that_is_not(run: Planting) -> None:
    change_account(run, 1, trained=0, masked={"no_variance": 10})


def trained_in_a_flat_group(run: Planting) -> None:
    change_verdict(run, 2, reward=1.0)
    change_account(run, 1, reward=1.0, shaped=1.0)


def zero_for_no_verdict(run: Planting) -> None:
    change_verdict(run, 2, reward=None)


def zero_for_a_lost_execution(run: Planting) -> None:
    change_verdict(run, 3, reward=0.0)
    run.change_outcome(3, f.Outcome.LOST)


def zero_for_a_cancelled_execution(run: Planting) -> None:
    change_verdict(run, 2, reward=0.0)
    run.change_outcome(2, f.Outcome.CANCELLED)


def zero_in_the_evaluation(run: Planting) -> None:
    change_verdict(run, 5, reward=None)
    run.change(run.where(seen.EvalResult)[0], rewards=[0.0])


def zero_in_the_mean(run: Planting) -> None:
    """The mean counts the member without a verdict as 0."""
    change_verdict(run, 2, reward=None)
    change_account(run, 1, reward=None, shaped=None, advantage=None)


def advantage_without_verdict(run: Planting) -> None:
    change_verdict(run, 2, reward=None)
    change_account(run, 1, reward=None, shaped=None)
    run.change(run.where(seen.StepReport)[0], mean_reward=1.0)


def excluded_and_trained(run: Planting) -> None:
    change_verdict(run, 1, exclusion="overlong")
    change_account(run, 0, shaped=None)


def other_shaped_reward(run: Planting) -> None:
    change_verdict(run, 1, shaped=0.25)


def valid_without_advantage(run: Planting) -> None:
    change_account(run, 1, advantage=None)


PLANTED: list[tuple[Callable[[Planting], None], str, str]] = [
    (not_balanced, "P11", "60 trained, 23 masked and 13 dropped are not 97 sampled"),
    (fewer_sampled_than_recorded, "P11", "96 tokens told as sampled, 97 are recorded"),
    (more_told_than_trained, "P11", "64 tokens told as trained, accepted steps trained 60"),
    (a_member_without_account, "P11", "e000001 was consumed by step 0 and has 0 accounts"),
    (two_accounts, "P11", "e000002 was consumed by step 0 and has 2 accounts"),
    (account_of_a_stranger, "P11", "e000003 has an account or trained tokens, but no step"),
    (trained_twice, "P11", "tokens [8, 10) of e000001.t2 are trained twice"),
    (trained_once_more, "P11", "are trained twice"),
    (abandoned_attempt_trained, "P11", "is no recorded line"),
    (earlier_launch_trained, "P11", "e000001.t2 attempt 0 is trained and relaunched"),
    (evaluation_trained, "P11", "e000005 has an account or trained tokens, but no step"),
    (attempt_not_recorded, "P11", "97 tokens told as sampled, 94 are recorded"),
    (dropped_for_a_reason_it_has_not, "P11", "dropped as no_verdict, it is valid"),
    (dropped_for_another_reason_than_told, "P11", "dropped as truncated, it is overlong"),
    (refused_in_a_step_that_was_not, "P11", "masked as not_applied in a step that was"),
    (flat_in_a_group_that_is_not, "P11", "masked as no_variance in a group whose values are 1"),
    (trained_in_a_flat_group, "P11", "trained in a group whose values are equal"),
    (zero_for_no_verdict, "P12", "has reward 0.0 in its account, None in the journal"),
    (zero_for_a_lost_execution, "P12", "e000003 was lost and has reward 0.0"),
    (zero_for_a_cancelled_execution, "P12", "e000002 was cancelled and has reward 0.0"),
    (zero_in_the_evaluation, "P12", "e000005 has reward 0.0 in its evaluation, None in the"),
    (zero_in_the_mean, "P12", "step 0 tells a mean reward of 0.5, its 1 verdicts have 1.0"),
    (advantage_without_verdict, "P12", "has no verdict, but advantage"),
    (excluded_and_trained, "P12", "has overlong, but advantage"),
    (other_shaped_reward, "P12", "is compared by 1.0 in its account, by 0.25 in the journal"),
    (valid_without_advantage, "P12", "is valid and has no advantage"),
]


@pytest.mark.parametrize(
    ("plant", "promise", "words"), PLANTED, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_planted_violation_is_found_and_named(
    run: Planting, plant: Callable[[Planting], None], promise: str, words: str
) -> None:
    plant(run)
    result = run.results()[promise]
    assert not result.is_kept
    assert any(words in one for one in result.problems), result.problems


def test_a_zero_in_the_tables_is_found(run: Planting) -> None:
    rewards = {f"e{n:06d}": reward for n, reward in ((1, 1.0), (2, 0.0), (3, 0.0), (4, None))}
    recorded = Recorded(outcomes={}, rewards={**rewards, "e000005": 0.5})
    words = "e000003 has reward 0.0 in the executions table, None in the journal"
    assert run.results(recorded)["P12"].problems == (words,)


def test_a_placeholder_that_the_config_names_is_counted(run: Planting) -> None:
    run.change_outcome(4, f.Outcome.LOST)
    reason = "grading.placeholder_reward, it never started: no space"
    change_verdict(run, 4, reward=0.0, reason=reason)
    result = run.results()["P12"]
    assert result.is_kept
    assert result.notes == ("1 rewards are grading.placeholder_reward",)


def test_an_older_run_without_accounts_is_told_not_failed(run: Planting) -> None:
    run.change(run.where(seen.StepReport)[0], members=[])
    result = run.results()["P11"]
    assert result.is_kept
    assert result.num_checked == 3
    assert "137 tokens sampled = 70 trained + 0 masked + 67 dropped" in result.notes
    assert "1 steps told no accounts (an older version wrote them): not compared" in result.notes
