"""P7, P8, P9: what P stages, K cells and the order of events did with a step cannot be seen in it.

Two updates of every story equal those of one plain process, in weights, moments, norm and loss.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from opengyre.seams.cells import UpdateNorms
from opengyre.trajectory.bundles import Layout
from tests.plain_training import worst_relative
from tests.stage_stories import (
    KL,
    Fleet,
    Kind,
    Story,
    are_ends_equal,
    groups_of,
    old_objects_aside,
    reference,
    rows_of_step,
)

NUM_STAGES = (1, 2, 4)
KINDS = [
    Kind(family=family, is_tied=is_tied, kl_coefficient=kl_coefficient)
    for family, is_tied, kl_coefficient in itertools.product(
        ("qwen3", "llama"), (True, False), (0.0, KL)
    )
]
TALLY: Counter[str] = Counter()


def _words(param: tuple[Kind, int]) -> str:
    return f"{param[0]}, {param[1]} stages"


@pytest.fixture(scope="module", params=itertools.product(KINDS, NUM_STAGES), ids=_words)
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    kind, num_stages = request.param
    with old_objects_aside():
        made = Fleet(kind, num_stages, tmp_path_factory.mktemp("planes"))
        yield made
        made.close()


def _play(fleet: Fleet, layout: Layout, seed: int, *, is_together: bool) -> None:
    kind = fleet.kind
    groups = groups_of(kind.family, layout, is_tied=kind.is_tied)
    story = Story(fleet, groups, seed, is_together=is_together)
    want = reference(kind)

    def check(step: int, norms: UpdateNorms) -> None:
        assert norms.is_applied, norms.reason
        assert norms.grad_norm == pytest.approx(want[step].grad_norm, rel=1e-9)
        assert norms.loss == pytest.approx(want[step].loss, rel=1e-9)
        assert worst_relative(story.core.parameters(), want[step].weights) < 1e-9
        assert are_ends_equal(story.snapshot) or not kind.is_tied

    story.run(check)
    assert worst_relative(fleet.moments(), want[-1].moments) < 1e-9
    TALLY.update(asdict(story.tally))


@pytest.mark.parametrize(
    ("layout", "is_together"),
    [(Layout.PATH, False), (Layout.TREE, True), (Layout.TREE, False)],
    ids=["path, star", "tree, together", "tree, star"],
)
def test_two_updates_equal_those_of_one_plain_process(
    fleet: Fleet, layout: Layout, is_together: bool
) -> None:
    place = KINDS.index(fleet.kind) * 100 + fleet.num_stages * 10 + 2 * is_together
    _play(fleet, layout, place + (layout is Layout.TREE), is_together=is_together)


def test_the_stories_had_joins_deaths_and_pauses_of_every_sort() -> None:
    assert [name for name, num in TALLY.items() if num < 5] == []


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_both_layouts_hold_the_same_paths(family: str) -> None:
    by_path, by_tree = (
        {(row.execution, row.path.leaf.turn, row.advantage) for row in rows_of_step(made, 0)}
        for made in (groups_of(family, layout, is_tied=True) for layout in Layout)
    )
    assert by_path == by_tree
    assert len(by_path) > 12
