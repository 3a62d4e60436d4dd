"""How the prompts that are computed share the tokens of a step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opengyre.engines.torch_engine.batch import MIN_SHARES, prompt_shares


def shares(wanted: list[int], budget: int) -> list[int]:
    return prompt_shares(np.array(wanted, np.int64), budget)


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(0, 4096))
def test_a_budget_is_used_whole_and_never_exceeded(wanted: list[int], budget: int) -> None:
    given_out = shares(wanted, budget)
    assert sum(given_out) == min(budget, sum(wanted))
    assert all(0 <= one <= want for one, want in zip(given_out, wanted, strict=True))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(8, 4096))
def test_the_first_eight_have_their_least_chunk(wanted: list[int], budget: int) -> None:
    for one, want in list(zip(shares(wanted, budget), wanted, strict=True))[:MIN_SHARES]:
        assert one >= min(want, budget // MIN_SHARES)


def test_a_short_prompt_is_computed_whole_beside_a_long_one() -> None:
    assert shares([32_000, 100], 512) == [412, 100]
    assert shares([32_000, 8_000, 100], 512) == [206, 206, 100]


def test_when_there_is_too_little_who_came_first_goes_on() -> None:
    assert shares([300] * 10, 64) == [8] * 8 + [0] * 2
    assert shares([5, 5], 1) == [1, 0]
