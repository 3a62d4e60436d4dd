"""Which engine of a fleet a session gets, and where it goes when that one is gone."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.runtime.recording.fleet_routes import COMING_S, FleetRoutes, Place


class Fleet:
    """Engines whose requests the test counts, and a clock it moves."""

    def __init__(self, num_engines: int) -> None:
        self.now_s = 0.0
        self.num_asked = Counter[str]()
        self.places = [self._place(f"s{number}") for number in range(num_engines)]
        self.routes = FleetRoutes(self.places, now_s=lambda: self.now_s)

    def _place(self, name: str) -> Place:
        place = Place(engine_id=name, num_asked=lambda: self.num_asked[name])
        place.is_connected = True
        return place

    def loads(self) -> list[int]:
        return [place.load(self.now_s)[0] for place in self.places]


def test_a_new_session_goes_to_the_fewest_requests_then_sessions_then_the_first() -> None:
    fleet = Fleet(3)
    assert [fleet.routes.route(f"a{number}") for number in range(3)] == ["s0", "s1", "s2"]
    fleet.now_s += COMING_S
    fleet.num_asked.update(s0=2, s1=1, s2=1)
    fleet.routes.route("b")
    fleet.now_s += COMING_S
    assert [place.num_sessions for place in fleet.places] == [1, 2, 1]
    assert fleet.routes.route("c") == "s2"


def test_sessions_that_open_together_do_not_all_see_the_same_idle_engine() -> None:
    fleet = Fleet(2)
    fleet.num_asked.update(s0=3, s1=4)
    opened = Counter(fleet.routes.route(f"a{number}") for number in range(9))
    assert opened == {"s0": 5, "s1": 4}


def test_a_session_stays_with_its_prefixes_however_busy_their_engine_is() -> None:
    fleet = Fleet(2)
    assert fleet.routes.route("a") == "s0"
    fleet.num_asked.update(s0=50)
    assert fleet.routes.route("a") == "s0"


def test_orphans_go_where_there_is_least_to_do_and_their_running_requests_count_at_once() -> None:
    fleet = Fleet(3)
    for number in range(6):
        fleet.routes.route(f"a{number}")
    fleet.now_s += COMING_S
    fleet.num_asked.update(s1=3, s2=1)
    fleet.places[0].is_connected = False
    running = {"a0": 1, "a3": 3}
    assert fleet.routes.move_orphans(lambda name: running[name]) == [("a3", "s2"), ("a0", "s1")]


def test_while_no_engine_is_there_nobody_moves_and_the_first_one_back_serves_all() -> None:
    fleet = Fleet(2)
    names = [f"a{number}" for number in range(4)]
    before = {name: fleet.routes.route(name) for name in names}
    for place in fleet.places:
        place.is_connected = False
    assert fleet.routes.move_orphans(lambda name: 1) == []
    fleet.places[1].is_connected = True
    moved = fleet.routes.move_orphans(lambda name: 1)
    assert moved == [(name, "s1") for name in names if before[name] == "s0"]


@settings(deadline=None, max_examples=60)
@given(
    num_asked=st.lists(st.integers(0, 12), min_size=2, max_size=5),
    orphans=st.lists(st.integers(0, 6), min_size=1, max_size=12),
)
def test_no_orphan_makes_an_engine_busier_than_one_that_was_free_to_take_it(
    num_asked: list[int], orphans: list[int]
) -> None:
    fleet = Fleet(len(num_asked) + 1)
    for place in fleet.places[1:]:
        place.is_connected = False
    running = {f"a{number}": num for number, num in enumerate(orphans)}
    for name in running:
        fleet.routes.route(name)
    fleet.now_s += COMING_S
    fleet.places[0].is_connected = False
    for place, num in zip(fleet.places[1:], num_asked, strict=True):
        place.is_connected = True
        fleet.num_asked[place.engine_id] = num
    moved = dict(fleet.routes.move_orphans(lambda name: running[name]))
    assert moved.keys() == running.keys()
    loads = fleet.loads()[1:]
    assert sum(loads) == sum(num_asked) + sum(orphans)
    for place, load in zip(fleet.places[1:], loads, strict=True):
        smallest = min((running[n] for n, to in moved.items() if to == place.engine_id), default=0)
        if smallest > 0:
            assert load - smallest <= min(loads)
