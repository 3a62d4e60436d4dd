"""The drawing of docs/training.md, drawn anew: a step of three cells of two stages."""

import pytest

from tests.training_picture import LEAVES_S, NUM_CELLS, NUM_GROUPS, NUM_STAGES, drawn
from tests.training_svg import Kind, Span, broken_rules, spans_of, svg_of


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    return drawn()


def test_a_step_of_three_cells_of_two_stages_keeps_the_rules_of_its_page(
    spans: list[Span],
) -> None:
    assert broken_rules(spans, num_stages=NUM_STAGES) == []
    assert {one.cell for one in spans if one.kind is Kind.FORWARD} == set(range(NUM_CELLS))
    pulls = {one.cell: one.begin_s for one in spans if one.kind is Kind.PULL}
    assert all(pulls[cell] >= LEAVES_S[cell] for cell in range(1, NUM_CELLS))
    assert [one.number for one in spans if one.kind is Kind.READY] == list(range(NUM_GROUPS))


def test_a_picture_read_back_is_what_was_drawn(spans: list[Span]) -> None:
    told = spans_of(svg_of(spans))
    assert sorted(one.title for one in told) == sorted(one.title for one in spans)
