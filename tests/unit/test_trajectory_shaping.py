"""Built-in transforms against their formulas, and what a failing one gives."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.trajectory.shaping import (
    SAMPLE_STATS,
    ExecutionStats,
    NamedTransform,
    ShapingError,
    Transform,
    format_penalty,
    length_penalty,
    shaped_reward,
)

TOKENS = st.integers(0, 4000)


def sampled(num_tokens: int) -> ExecutionStats:
    return replace(SAMPLE_STATS, tokens_by_role={"main": num_tokens})


def called(*, read: int, malformed: int) -> ExecutionStats:
    return replace(SAMPLE_STATS, num_calls=read, num_malformed_calls=malformed)


def named(*transforms: Transform) -> list[NamedTransform]:
    return [NamedTransform(name=f"mine{i}", apply=one) for i, one in enumerate(transforms)]


@pytest.mark.parametrize(
    ("num_tokens", "shaped"),
    [(0, 1.0), (800, 1.0), (801, 0.995), (900, 0.5), (1000, 0.0), (1001, 0.0), (9000, 0.0)],
)
def test_the_length_penalty_is_none_then_linear_then_whole(num_tokens: int, shaped: float) -> None:
    penalty = length_penalty(max_tokens=1000, buffer_tokens=200)
    assert penalty(1.0, sampled(num_tokens)) == pytest.approx(shaped)


@given(num_tokens=TOKENS, max_tokens=st.integers(1, 3000), data=st.data())
def test_the_length_penalty_is_the_published_one_in_three_pieces(
    num_tokens: int, max_tokens: int, data: st.DataObject
) -> None:
    cache = data.draw(st.integers(1, max_tokens))
    if num_tokens <= max_tokens - cache:
        published = 0.0
    elif num_tokens <= max_tokens:
        published = ((max_tokens - cache) - num_tokens) / cache
    else:
        published = -1.0
    penalty = length_penalty(max_tokens=max_tokens, buffer_tokens=cache, weight=0.5)
    assert penalty(0.25, sampled(num_tokens)) == pytest.approx(0.25 + 0.5 * published)


def test_the_length_penalty_counts_the_tokens_of_all_roles() -> None:
    penalty = length_penalty(max_tokens=100, buffer_tokens=100)
    stats = replace(SAMPLE_STATS, tokens_by_role={"main": 30, "sub-agent": 15, "side": 5})
    assert penalty(1.0, stats) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("read", "malformed", "shaped"), [(0, 0, 1.0), (4, 0, 1.0), (3, 1, 0.5), (0, 2, -1.0)]
)
def test_the_format_penalty_goes_by_the_share_of_calls_that_could_not_be_read(
    read: int, malformed: int, shaped: float
) -> None:
    stats = called(read=read, malformed=malformed)
    assert format_penalty(weight=2.0)(1.0, stats) == pytest.approx(shaped)


def test_transforms_are_applied_in_order() -> None:
    doubled, less_one = (lambda r, s: 2 * r), (lambda r, s: r - 1)
    assert shaped_reward(3.0, SAMPLE_STATS, named(doubled, less_one)) == 5.0
    assert shaped_reward(3.0, SAMPLE_STATS, named(less_one, doubled)) == 4.0
    assert shaped_reward(3.0, SAMPLE_STATS, []) == 3.0


def test_a_whole_number_is_a_reward() -> None:
    got = shaped_reward(0.5, SAMPLE_STATS, named(lambda r, s: 1))
    assert (got, type(got)) == (1.0, float)


@pytest.mark.parametrize(
    "answer", [float("nan"), float("inf"), -float("inf"), None, "1", True, [1.0], 1j]
)
def test_an_answer_that_is_no_finite_number_gives_no_reward(answer: object) -> None:
    def bad(reward: float, stats: ExecutionStats) -> float:
        return answer  # type: ignore[return-value]

    with pytest.raises(ShapingError, match=r"^mine1 answered .* not a finite number$") as failed:
        shaped_reward(1.0, SAMPLE_STATS, named(lambda r, s: r, bad))
    assert failed.value.transform == "mine1"


def test_a_transform_that_raises_is_named_in_one_short_line() -> None:
    def bad(reward: float, stats: ExecutionStats) -> float:
        raise KeyError("a\nb" * 1000)

    with pytest.raises(ShapingError) as failed:
        shaped_reward(1.0, SAMPLE_STATS, named(bad))
    words = str(failed.value)
    assert words.startswith("mine0 raised KeyError: ")
    assert "\n" not in words
    assert len(words) < 400


@pytest.mark.parametrize(
    ("outcome", "last_finish", "is_truncated"),
    [
        ("completed", "stop", False),
        ("completed", "length", True),
        ("failed", "length", True),
        ("failed", "cancelled", False),
        ("timed_out", "stop", True),
        ("completed", "", False),
    ],
)
def test_an_execution_is_truncated_by_its_deadline_or_in_its_last_main_turn(
    outcome: str, last_finish: str, is_truncated: bool
) -> None:
    stats = replace(SAMPLE_STATS, outcome=outcome, last_finish=last_finish)
    assert stats.is_truncated is is_truncated


class _Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class _Odd(Fraction):
    def __repr__(self) -> str:
        raise RuntimeError


def _raising(error: BaseException) -> Transform:
    def transform(reward: float, stats: ExecutionStats) -> float:
        raise error

    return transform


@pytest.mark.parametrize("answer", [10**400, Fraction(10**400, 3), 1e200, -1e7, _Odd(10**9)])
def test_an_answer_that_no_mean_can_hold_costs_the_execution_its_part(answer: float) -> None:
    with pytest.raises(ShapingError, match="odd "):
        shaped_reward(0.5, SAMPLE_STATS, [NamedTransform(name="odd", apply=lambda *_: answer)])


@pytest.mark.parametrize("error", [_Silent(), SystemExit(4), ValueError("a\x1b[31m\nb")])
def test_whatever_a_transform_raises_is_one_plain_line(error: BaseException) -> None:
    with pytest.raises(ShapingError) as caught:
        shaped_reward(0.5, SAMPLE_STATS, [NamedTransform(name="odd", apply=_raising(error))])
    assert str(caught.value).isprintable()
