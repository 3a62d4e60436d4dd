"""Rule 5: which ready groups an open step may take."""

from itertools import product

from opengyre.control.ids import GroupId
from opengyre.control.staleness import Choice, Places, VersionLoad, choose


def load(version: int, *ready: str, live: int = 0) -> VersionLoad:
    return VersionLoad(version=version, ready=tuple(GroupId(one) for one in ready), num_live=live)


def places(*, version: int, left: int, bound: int, per_step: int = 2) -> Places:
    return Places(
        step_version=version, num_places=left, places_per_step=per_step, max_staleness=bound
    )


def test_older_versions_come_first_and_dispatch_order_within() -> None:
    choice = choose(
        [load(0, "g2", "g5"), load(1, "g6")], places(version=1, left=3, bound=3, per_step=3)
    )
    assert choice.groups == ("g2", "g5", "g6")


def test_no_more_groups_than_places_are_taken() -> None:
    choice = choose([load(0, "g0", "g1", "g2")], places(version=0, left=2, bound=2))
    assert choice == Choice(groups=(GroupId("g0"), GroupId("g1")), blocked_by=None)


def test_a_newer_group_overtakes_a_live_one_that_still_has_a_later_step() -> None:
    choice = choose([load(0, live=1), load(1, "g9")], places(version=1, left=2, bound=2))
    assert choice.groups == ("g9",)


def test_a_newer_group_waits_when_it_would_take_the_last_place_of_an_older_one() -> None:
    choice = choose([load(0, live=2), load(1, "g9")], places(version=2, left=2, bound=2))
    assert choice == Choice(groups=(), blocked_by=0)


def test_one_spare_place_lets_exactly_one_newer_group_pass() -> None:
    choice = choose([load(0, live=1), load(1, "g8", "g9")], places(version=2, left=2, bound=2))
    assert choice == Choice(groups=(GroupId("g8"),), blocked_by=0)


def test_the_strict_bound_of_full_run_ahead_never_blocks_one_version() -> None:
    choice = choose([load(0, "g3", live=5)], places(version=0, left=2, bound=2))
    assert choice.groups == ("g3",)


def test_overdue_live_groups_block_everything_newer_until_they_are_dropped() -> None:
    choice = choose([load(0, live=1), load(4, "g9")], places(version=4, left=2, bound=2))
    assert choice == Choice(groups=(), blocked_by=0)


def feasible(counts: dict[int, int], at: Places) -> bool:
    """Earliest deadline first, step by step, by hand."""
    left = dict(counts)
    version, room = at.step_version, at.num_places
    while any(left.values()):
        for one in sorted(left):
            taken = min(room, left[one])
            left[one] -= taken
            room -= taken
        if any(num and one + at.max_staleness <= version for one, num in left.items()):
            return False
        version, room = version + 1, at.places_per_step
    return True


def test_every_choice_keeps_every_deadline_that_could_be_kept() -> None:
    """All small loads: after the choice, all that is left still meets its deadline."""
    checked = 0
    for live0, ready0, live1, ready1, left, version in product(
        range(3), range(3), range(3), range(3), range(3), range(1, 4)
    ):
        at = places(version=version, left=left, bound=2)
        if not feasible({0: live0 + ready0, 1: live1 + ready1}, at):
            continue
        loads = [
            load(0, *(f"a{n}" for n in range(ready0)), live=live0),
            load(1, *(f"b{n}" for n in range(ready1)), live=live1),
        ]
        taken = choose(loads, at).groups
        after = {
            0: live0 + ready0 - sum(one.startswith("a") for one in taken),
            1: live1 + ready1 - sum(one.startswith("b") for one in taken),
        }
        rest = places(version=version, left=left - len(taken), bound=2)
        assert feasible(after, rest), (loads, at, taken)
        checked += 1
    assert checked > 200
