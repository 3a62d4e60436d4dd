"""Groups without variance are filtered, and oversampling dispatches for them: named cases."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.control import commands as c
from opengyre.control.config import Overdue
from opengyre.control.errors import InvariantError
from opengyre.control.facts import VerdictGiven
from opengyre.control.groups import GroupState
from opengyre.control.ids import execution_id, group_id
from opengyre.control.quota import least_staleness, most_outstanding
from tests.unit.control_desk import Desk, make_config


def num_dispatched(desk: Desk) -> list[int]:
    return [len(one.groups) for one in desk.given if isinstance(one, c.DispatchGroups)]


def filtering(**numbers: object) -> Desk:
    return Desk(make_config(filter_zero_variance=True, slots=16, **numbers)).start()


def test_a_group_whose_values_do_not_differ_is_filtered_and_missed_by_its_step() -> None:
    desk = filtering()
    desk.judge("g00000", 0.5, 0.5)
    assert (desk.view.num_filtered, desk.view.num_ready, desk.view.num_void) == (1, 0, 0)
    desk.judge("g00001", 0.5, 1.0)
    desk.assign("g00001")
    desk.commit()
    assert (desk.view.num_short_steps, desk.view.num_consumed, desk.view.steps_done) == (1, 1, 1)
    assert num_dispatched(desk) == [2, 2]


def test_without_the_filter_it_is_trained_as_before() -> None:
    desk = Desk(make_config()).start()
    desk.judge("g00000", 0.5, 0.5)
    assert (desk.view.num_filtered, desk.view.num_ready) == (0, 1)


def test_values_that_differ_by_rounding_alone_do_not_differ() -> None:
    desk = filtering()
    desk.judge("g00000", 0.3, 0.1 + 0.2)
    desk.judge("g00001", 0.3, 0.3 + 1e-7)
    assert (desk.view.num_filtered, desk.view.num_ready) == (1, 1)


def test_the_shaped_values_count_and_not_the_rewards() -> None:
    """All rewards are 1; a shaped value of None is the reward itself."""
    told = {"reason": "", "num_trainable_tokens": 1}
    one = VerdictGiven(execution=execution_id(0), reward=1.0, **told)
    assert one.value == 1.0
    two = VerdictGiven(execution=execution_id(0), reward=1.0, shaped=0.0, **told)
    assert two.value == 0.0
    three = VerdictGiven(execution=execution_id(0), reward=None, shaped=0.5, **told)
    assert three.value is None


def test_an_excluded_member_is_neither_valid_nor_compared() -> None:
    desk = filtering(group_size=3, min_valid_members=2)
    desk.judge("g00000", 0.0, 1.0, 1.0, exclusion="truncated")
    assert desk.view.num_filtered == 1
    desk = filtering(group_size=2, min_valid_members=2)
    desk.judge("g00000", 0.0, 1.0, exclusion="truncated")
    assert (desk.view.num_filtered, desk.view.num_void) == (0, 1)


def test_filtered_groups_never_stop_the_run_and_break_a_row_of_void_ones() -> None:
    desk = filtering(groups_per_step=4, max_void_in_a_row=2)
    desk.finish("g00000", reward=None)
    desk.judge("g00001", 1.0, 1.0)
    desk.finish("g00002", reward=None)
    desk.judge("g00003", 1.0, 1.0)
    assert (desk.view.num_void, desk.view.num_filtered) == (2, 2)
    assert not any(isinstance(one, c.EndRun) for one in desk.given)


def test_a_burst_all_of_whose_groups_are_filtered_ends_at_once() -> None:
    desk = filtering(num_steps=2)
    desk.judge("g00000", 1.0, 1.0)
    desk.judge("g00001", 1.0, 1.0)
    view = desk.view
    assert (view.steps_done, view.num_empty_steps, view.burst, view.version) == (1, 1, 2, 0)
    assert num_dispatched(desk) == [2, 2]


def test_oversampled_groups_fill_the_step_that_a_filtered_one_would_have_left_short() -> None:
    desk = filtering(oversample=1.5)
    assert num_dispatched(desk) == [3]
    desk.judge("g00000", 1.0, 1.0)
    desk.judge("g00001", 0.0, 1.0)
    desk.judge("g00002", 0.0, 1.0)
    desk.assign("g00001", "g00002")
    desk.commit()
    assert (desk.view.num_short_steps, desk.view.num_filtered) == (0, 1)
    assert num_dispatched(desk) == [3, 3]


def test_what_is_left_over_is_trained_first_and_lowers_the_next_dispatch() -> None:
    desk = filtering(oversample=1.5, num_steps=3)
    for group in ("g00000", "g00001", "g00002"):
        desk.judge(group, 0.0, 1.0)
    desk.assign("g00000", "g00001")
    desk.commit()
    assert num_dispatched(desk) == [3, 2]
    assert desk.view.num_ready == 1
    desk.judge("g00003", 0.0, 1.0)
    offer = desk.last(c.Offer)
    assert isinstance(offer, c.Offer)
    assert offer.groups == ("g00002", "g00003")


def test_the_last_step_is_oversampled_too_and_its_surplus_is_left_and_shown() -> None:
    desk = filtering(oversample=2.0, num_steps=1)
    assert num_dispatched(desk) == [4]
    for group in ("g00000", "g00001", "g00002"):
        desk.judge(group, 0.0, 1.0)
    desk.assign("g00000", "g00001")
    desk.commit()
    cut = [one.execution for one in desk.given if isinstance(one, c.Cancel)]
    assert tuple(cut) == desk.members_by_group[group_id(3)]
    desk.close(*cut, reward=None)
    desk.settle()
    end = desk.last(c.EndRun)
    assert isinstance(end, c.EndRun)
    assert not end.failed
    assert (desk.view.num_consumed, desk.view.num_ready, desk.view.num_void) == (2, 1, 1)


@pytest.mark.parametrize("overdue", list(Overdue))
def test_the_least_bound_grows_with_oversampling(overdue: Overdue) -> None:
    numbers = {"run_ahead": 1, "groups_per_step": 4, "oversample": 1.25, "overdue": overdue}
    assert make_config(**numbers).staleness_bound == 3
    assert make_config(**numbers, max_staleness=2).staleness_bound == 2
    with pytest.raises(InvariantError, match="max_staleness"):
        make_config(**numbers, max_staleness=1)
    with pytest.raises(InvariantError, match="oversample"):
        make_config(oversample=0.99)


def test_without_oversampling_the_numbers_are_those_of_whole_steps() -> None:
    for num_steps in range(8):
        for groups in range(1, 40):
            at = {"num_steps": num_steps, "groups_per_step": groups, "oversample": 1.0}
            assert most_outstanding(**at) == num_steps * groups
            assert least_staleness(**at) == max(0, num_steps - 1)


@given(st.integers(1, 64), st.integers(1, 4096), st.decimals("1", "16", places=2))
def test_the_quota_is_rounded_up_from_the_exact_product(
    num_steps: int, groups: int, oversample: object
) -> None:
    exact = Fraction(str(oversample)) * num_steps * groups
    at = {"num_steps": num_steps, "groups_per_step": groups, "oversample": float(str(oversample))}
    assert most_outstanding(**at) == ceil(exact)
    assert least_staleness(**at) == ceil(Fraction(ceil(exact), groups)) - 1
    assert least_staleness(**at) == ceil(Fraction(str(oversample)) * num_steps) - 1


def test_a_filtered_group_is_over() -> None:
    assert GroupState.FILTERED.value == "filtered"
    desk = filtering()
    desk.judge("g00000", 1.0, 1.0)
    assert [one.group for one in desk.scheduler._run.groups.by_id.values()] == ["g00001"]
