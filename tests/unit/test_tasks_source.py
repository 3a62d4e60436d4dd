"""The draw: the same task for the same group, whole rounds, shares by weight, no overlap."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.seams.errors import ConfigError
from opengyre.seams.tasks import Task
from opengyre.tasks.source import SampledTasks, TaskSet, refuse_overlap


def task(name: str, content_hash: str = "") -> Task:
    return Task(
        name=name,
        folder=Path("/sets") / name,
        instruction="Do it.",
        workspace=None,
        tests=Path("/sets") / name / "tests",
        content_hash=content_hash or name,
    )


def task_set(prefix: str, num_tasks: int, weight: float = 1.0) -> TaskSet:
    return TaskSet(tasks=tuple(task(f"{prefix}{i}") for i in range(num_tasks)), weight=weight)


def names(source: SampledTasks, first: int, last: int) -> list[str]:
    return [source.task_for_group(index).name for index in range(first, last)]


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_every_round_of_one_set_holds_each_task_once(num_tasks: int, seed: int) -> None:
    source = SampledTasks([task_set("t", num_tasks)], seed=seed)
    whole = sorted(one.name for one in source.tasks)
    for number in range(3):
        assert sorted(names(source, number * num_tasks, (number + 1) * num_tasks)) == whole


def test_the_task_of_a_group_does_not_depend_on_what_was_asked_before() -> None:
    sets = [task_set("a", 5, 2.0), task_set("b", 3, 1.0)]
    in_order = names(SampledTasks(sets, seed=4), 0, 60)
    fresh = [SampledTasks(sets, seed=4).task_for_group(index).name for index in range(60)]
    assert fresh == in_order


def test_another_seed_gives_another_order() -> None:
    orders = {
        tuple(names(SampledTasks([task_set("t", 32)], seed=seed), 0, 32)) for seed in range(5)
    }
    assert len(orders) == 5


def test_shares_follow_the_weights_at_every_moment() -> None:
    source = SampledTasks([task_set("a", 7, 3.0), task_set("b", 4, 1.0)], seed=0)
    drawn = names(source, 0, 400)
    for end in range(1, 401):
        share = Counter(name[0] for name in drawn[:end])["a"]
        assert abs(share - 0.75 * end) <= 1.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="positive"):
        SampledTasks([task_set("a", 1, weight)], seed=0)


def test_a_source_without_tasks_is_refused() -> None:
    for sets in ([], [task_set("a", 0)]):
        with pytest.raises(ConfigError, match="at least one task"):
            SampledTasks(sets, seed=0)


def test_a_held_out_task_that_is_trained_on_under_another_name_is_refused() -> None:
    training = [task("t1", "same"), task("t2")]
    refuse_overlap(training, [task("e1"), task("e2")])
    with pytest.raises(ConfigError, match="/sets/e1 is /sets/t1"):
        refuse_overlap(training, [task("e1", "same")])
