"""Durations drawn by key: means, sigmas, caps, recorded ones, CSV."""

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from opengyre.control.errors import InvariantError
from opengyre.seams.errors import ConfigError
from opengyre.simulate.draws import Purpose, normal, uniform
from opengyre.simulate.workload import (
    EmpiricalWorkload,
    Endings,
    LognormalWorkload,
    Recorded,
    read_csv,
    to_csv,
)

GROUPS, MEMBERS = 1000, 4


def durations(workload: LognormalWorkload, seed: int = 5) -> list[list[float]]:
    return [
        [workload.draw(seed, group, member).duration_s for member in range(MEMBERS)]
        for group in range(GROUPS)
    ]


def test_drawn_numbers_are_uniform_and_independent_of_their_neighbours() -> None:
    drawn = [uniform(3, Purpose.SAMPLE, number) for number in range(4000)]
    assert fmean(drawn) == pytest.approx(0.5, abs=0.02)
    assert pstdev(drawn) == pytest.approx(math.sqrt(1 / 12), abs=0.01)
    products = [a * b for a, b in pairwise(drawn)]
    assert fmean(products) == pytest.approx(0.25, abs=0.02)
    assert pstdev(normal(3, Purpose.SAMPLE, number) for number in range(4000)) == pytest.approx(
        1.0, abs=0.05
    )


def test_a_draw_depends_on_every_part_of_its_key_and_on_nothing_else() -> None:
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, -2, 3)]
    drawn = [uniform(seed, Purpose.VOID, first, second) for seed, first, second in keys]
    assert len(set(drawn)) == len(keys)
    assert uniform(1, Purpose.VERDICT, 2, 3) not in drawn
    assert uniform(1, Purpose.VOID, 2, 3) == drawn[0]


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.4, 0.4)])
def test_the_mean_stays_whatever_the_sigmas(between: float, within: float) -> None:
    workload = LognormalWorkload(mean_s=100.0, sigma_between=between, sigma_within=within)
    drawn = [one for group in durations(workload) for one in group]
    assert fmean(drawn) == pytest.approx(100.0, rel=0.05)
    assert pstdev(map(math.log, drawn)) == pytest.approx(math.hypot(between, within), rel=0.06)


def test_sigma_between_spreads_groups_and_sigma_within_their_members() -> None:
    between = durations(LognormalWorkload(mean_s=100.0, sigma_between=0.5))
    within = durations(LognormalWorkload(mean_s=100.0, sigma_within=0.5))
    assert all(len(set(group)) == 1 for group in between)
    assert len({group[0] for group in between}) == GROUPS
    assert all(len(set(group)) == MEMBERS for group in within)


def test_the_paper_s_query_is_half_as_long_again_as_its_execution_with_the_derived_sigma() -> None:
    workload = LognormalWorkload(mean_s=1.93, sigma_within=0.468)
    assert fmean(max(group) for group in durations(workload)) == pytest.approx(2.96, rel=0.02)


def test_the_harness_cap_is_graded_and_the_overall_cap_is_discarded_unless_it_says_so() -> None:
    long = LognormalWorkload(mean_s=100.0, endings=Endings(harness_cap_s=60.0)).draw(1, 1, 1)
    assert (long.duration_s, long.is_capped, long.has_verdict) == (60.0, True, True)
    lost = LognormalWorkload(mean_s=100.0, endings=Endings(overall_cap_s=60.0)).draw(1, 1, 1)
    assert (lost.duration_s, lost.is_capped, lost.has_verdict) == (60.0, True, False)
    graded = Endings(overall_cap_s=60.0, is_overall_graded=True)
    assert LognormalWorkload(mean_s=100.0, endings=graded).draw(1, 1, 1).has_verdict
    short = LognormalWorkload(mean_s=50.0, endings=Endings(overall_cap_s=60.0)).draw(1, 1, 1)
    assert (short.duration_s, short.is_capped, short.has_verdict) == (50.0, False, True)


def test_the_harness_ends_an_execution_before_a_later_overall_cap() -> None:
    endings = Endings(harness_cap_s=60.0, overall_cap_s=80.0)
    drawn = LognormalWorkload(mean_s=100.0, endings=endings).draw(1, 1, 1)
    assert (drawn.duration_s, drawn.has_verdict) == (60.0, True)


def test_verdicts_are_missing_one_by_one_and_by_the_group() -> None:
    some = LognormalWorkload(mean_s=1.0, endings=Endings(no_verdict_rate=0.2))
    num = sum(some.draw(1, g, m).has_verdict for g in range(GROUPS) for m in range(MEMBERS))
    assert num / (GROUPS * MEMBERS) == pytest.approx(0.8, abs=0.02)
    void = LognormalWorkload(mean_s=1.0, endings=Endings(void_rate=0.2))
    kept = [{void.draw(1, g, m).has_verdict for m in range(MEMBERS)} for g in range(GROUPS)]
    assert all(len(one) == 1 for one in kept)
    assert kept.count({False}) / GROUPS == pytest.approx(0.2, abs=0.03)


def test_recorded_groups_are_drawn_whole_and_keep_a_missing_verdict() -> None:
    groups = (
        (Recorded(duration_s=1.0), Recorded(duration_s=2.0, has_verdict=False)),
        (Recorded(duration_s=10.0), Recorded(duration_s=20.0)),
    )
    workload = EmpiricalWorkload(groups=groups, endings=Endings(overall_cap_s=15.0))
    assert workload.mean_s == 8.25
    seen = {tuple(workload.draw(4, g, m).duration_s for m in range(2)) for g in range(50)}
    assert seen == {(1.0, 2.0), (10.0, 15.0)}
    more = [workload.draw(4, g, m) for g in range(50) for m in range(2, 6)]
    assert {one.duration_s for one in more} == {1.0, 2.0, 10.0, 15.0}
    assert not any(one.has_verdict for one in more if one.duration_s in (2.0, 15.0))


def test_a_csv_is_read_back_as_it_was_written() -> None:
    groups = (
        (Recorded(duration_s=1.5), Recorded(duration_s=2.25, has_verdict=False)),
        (Recorded(duration_s=0.1),),
    )
    assert read_csv(to_csv(groups)) == groups
    assert read_csv("duration_s,group\n3,a\n4,b\n5,a\n") == (
        (Recorded(duration_s=3.0), Recorded(duration_s=5.0)),
        (Recorded(duration_s=4.0),),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'group' is there 0 times"),
        ("group;duration_s\na;1\n", "with commas between"),
        ("group,seconds\n", "duration_s"),
        ("group,duration_s,duration_s\n", "'duration_s' is there 2 times"),
        ("group,duration_s\n", "expected lines after the first"),
        ("group,duration_s\na,0\nb,0\n", "one with a duration_s above 0"),
        ("group,duration_s\na,1,5\n", "line 2: expected 2 values as in the first line"),
        ("group,duration_s\n\n,1\n", "line 3: group is empty"),
        ("group,duration_s\na,1e308\n", "from 0 to 1e"),
        ("group,duration_s\n" + "a" * 200_000 + ",1\n", "line 2: field larger"),
        ("group,duration_s\na,long\n", "line 2"),
        ("group,duration_s\na,1\na,-1\n", "line 3"),
        ("group,duration_s\na,inf\n", "line 2"),
        ("group,duration_s,has_verdict\na,1,maybe\n", "line 2"),
        ("group,duration_s\na\n", "line 2"),
    ],
)
def test_a_bad_csv_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_csv(text)


def test_a_csv_of_a_spreadsheet_is_read() -> None:
    text = "\ufeffgroup , duration_s\r\na, 3\r\n\r\nb,4\r\n"
    assert read_csv(text) == ((Recorded(duration_s=3.0),), (Recorded(duration_s=4.0),))


def test_a_recorded_time_out_is_one_in_the_draw_too() -> None:
    timed_out = Recorded(duration_s=5.0, is_capped=True, has_verdict=False)
    draw = EmpiricalWorkload(groups=((timed_out,),)).draw(1, 0, 0)
    assert (draw.is_capped, draw.has_verdict, draw.duration_s) == (True, False, 5.0)


def test_workloads_out_of_bounds_are_refused() -> None:
    for numbers in ({"mean_s": 0.0}, {"mean_s": 1.0, "sigma_within": -1.0}):
        with pytest.raises(InvariantError):
            LognormalWorkload(**numbers)
    for numbers in ({"void_rate": 1.0}, {"no_verdict_rate": 2.0}, {"overall_cap_s": 0.0}):
        with pytest.raises(InvariantError):
            Endings(**numbers)
    for groups in ((), ((),), ((Recorded(duration_s=0.0),),)):
        with pytest.raises(InvariantError):
            EmpiricalWorkload(groups=groups)
