"""A step whose groups' rows are prepared beside it, and late at times."""

from collections import Counter
from collections.abc import Container, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.seams.cells import MicroStep
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.trajectory.bundles import Bundle
from tests.training_rows import alone, line_row

SIZES = {"g0": [4, 4], "g1": [6], "g2": [], "g3": [9, 2], "g4": [3]}


class Shelf:
    """What is prepared: everything, or what a test puts there."""

    def __init__(self, *prepared: str) -> None:
        self.prepared = set(prepared)
        self.told: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self._rows = {
            group: alone(
                *(line_row(f"{group}.{k}", size, group=group) for k, size in enumerate(sizes))
            )
            for group, sizes in SIZES.items()
        }

    def bundles_of(self, group: str) -> Sequence[Bundle] | None:
        return self._rows[group] if group in self.prepared else None

    def look_ahead(self, offered: Sequence[str], assigned: Container[str]) -> None:
        self.told.append((tuple(offered), tuple(one for one in SIZES if one in assigned)))


def _stream(shelf: Shelf, *, max_groups: int = 9, lookahead_groups: int = 2) -> StepStream:
    stream = StepStream(
        0,
        version=0,
        bundles_of=shelf.bundles_of,
        look_ahead=shelf.look_ahead,
        settings=StreamSettings(
            budget_tokens=8,
            lease_s=10.0,
            max_groups=max_groups,
            lookahead_groups=lookahead_groups,
        ),
    )
    stream.admit(0)
    return stream


def _executions(made: MicroStep | None) -> list[str]:
    return [] if made is None else [path.execution for path in made.paths]


def test_a_claim_that_reaches_what_is_not_prepared_gets_nothing_and_assigns_nothing() -> None:
    shelf = Shelf()
    stream = _stream(shelf)
    stream.offer(["g0"])
    claim = stream.claim(0, 0.0)
    assert claim.micro_step is None
    assert not claim.is_refused
    assert stream.assigned == ()
    shelf.prepared.add("g0")
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g0.0", "g0.1"]


def test_a_later_group_never_overtakes_one_that_is_not_prepared() -> None:
    shelf = Shelf("g1")
    stream = _stream(shelf)
    stream.offer(["g0", "g1"])
    assert stream.claim(0, 0.0).micro_step is None


def test_what_is_prepared_is_given_though_it_does_not_fill_a_micro_step() -> None:
    shelf = Shelf("g1")
    stream = _stream(shelf)
    stream.offer(["g1", "g0"])
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g1.0"]
    assert stream.assigned == ("g1",)


def test_near_the_end_what_is_left_of_other_groups_goes_on_while_the_last_is_prepared() -> None:
    shelf = Shelf("g0")
    stream = _stream(shelf, max_groups=2)
    stream.offer(["g0", "g3"])
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g0.0", "g0.1"]
    assert stream.claim(0, 0.0).micro_step is None
    shelf.prepared.add("g3")
    assert _executions(stream.claim(0, 0.0).micro_step) == ["g3.0"]


def test_what_comes_next_is_told_at_each_offer_and_each_assignment_alone() -> None:
    shelf = Shelf(*SIZES)
    stream = _stream(shelf)
    stream.offer(["g0", "g1"])
    stream.claim(0, 0.0)
    stream.claim(0, 0.0)
    stream.claim(0, 0.0)
    stream.offer(["g0", "g1", "g3"])
    assert shelf.told == [
        (("g0", "g1"), ()),
        (("g1",), ("g0",)),
        ((), ("g0", "g1")),
        (("g3",), ("g0", "g1")),
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_whenever_groups_are_prepared_each_row_is_claimed_once(data: st.DataObject) -> None:
    shelf = Shelf()
    lookahead_groups = data.draw(st.integers(1, 5))
    stream = _stream(shelf, max_groups=len(SIZES), lookahead_groups=lookahead_groups)
    stream.offer(list(SIZES))
    claimed: Counter[str] = Counter()
    for group in data.draw(st.permutations(list(SIZES))):
        for _ in range(data.draw(st.integers(0, 3))):
            claimed.update(_executions(stream.claim(0, 0.0).micro_step))
        shelf.prepared.add(group)
    while (made := stream.claim(0, 0.0).micro_step) is not None:
        claimed.update(_executions(made))
    assert stream.claim(0, 0.0).micro_step is None
    assert sorted(stream.assigned) == list(SIZES)
    assert claimed == Counter(f"{one}.{k}" for one in SIZES for k in range(len(SIZES[one])))
