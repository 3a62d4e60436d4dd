"""Rule 6 and 2.2.2 as properties: where executions are placed, and where a leaving cell's go."""

from hypothesis import given
from hypothesis import strategies as st

from opengyre.control import commands as c
from opengyre.control.cells import Engine, EngineState
from opengyre.control.executions import Execution
from opengyre.control.groups import Group
from opengyre.control.ids import EngineId, GroupId, execution_id
from opengyre.control.reservations import reserve
from opengyre.control.topology import Topology
from tests.unit.control_desk import Desk, make_config, names

TAKEN = 1000


def fleet(standalone: list[tuple[int, int]], cells: list[tuple[int, int]]) -> list[Engine]:
    """Engines with (slots, slots in use)."""
    stays = [*range(len(standalone)), *(100 - cell for cell in range(len(cells)))]
    engines = []
    for index, (slots, used) in enumerate([*standalone, *cells]):
        cell = index - len(standalone) if index >= len(standalone) else None
        name = f"s{index}" if cell is None else f"c{cell}"
        live = {execution_id(TAKEN + index * 10 + n): None for n in range(min(slots, used))}
        engine = Engine(
            engine=EngineId(name), slots=slots, cell=cell, number=index, stay=stays[index]
        )
        engine.live.update(live)
        engines.append(engine)
    return engines


SLOTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4)


@given(standalone=SLOTS, cells=SLOTS, num=st.integers(0, 12), data=st.data())
def test_moves_follow_the_order_of_preference_and_never_exceed_free_slots(
    standalone: list[tuple[int, int]],
    cells: list[tuple[int, int]],
    num: int,
    data: st.DataObject,
) -> None:
    engines = fleet(standalone, cells)
    executions = [execution_id(number) for number in range(num)]
    shuffled = data.draw(st.permutations(engines))
    moves = reserve(executions, shuffled)
    free = {one.engine: one.num_free for one in engines}
    assert (moves is None) == (sum(free.values()) < num)
    if moves is None:
        return
    assert [execution for execution, _ in moves] == executions
    by_id = {one.engine: one for one in engines}
    for _, name in moves:
        assert free[name] > 0
        chosen = by_id[name]
        for other in engines:
            if free[other.engine] > 0 and other is not chosen:
                assert preference(chosen, free) < preference(other, free)
        free[name] -= 1


def preference(engine: Engine, free: dict[EngineId, int]) -> tuple[int, int, int]:
    """Standalone by most free slots, then lowest id; then cells in descending index."""
    if engine.cell is None:
        return (0, -free[engine.engine], engine.number)
    return (1, -engine.cell, 0)


def open_topology(num_cells: int, num_standalone: int, slots: int) -> Topology:
    config = make_config(num_cells=num_cells, num_standalone=num_standalone, slots=slots)
    topology = Topology(config, num_fixed=0)
    for engine in topology.engines.values():
        for state in (EngineState.SHUT, EngineState.OPENING, EngineState.OPEN):
            topology.move_engine(engine, state)
    return topology


@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    shut=st.sets(st.sampled_from(["c0", "c1", "s0"]), max_size=2),
)
def test_a_member_goes_where_its_group_is_while_there_is_room_else_to_the_least_loaded(
    groups: list[int], shut: set[str]
) -> None:
    topology = open_topology(num_cells=2, num_standalone=1, slots=4)
    for name in sorted(shut):
        topology.move_engine(topology.engines[EngineId(name)], EngineState.SHUT)
    known = [
        Group(group=GroupId(f"g{n}"), number=n, version=0, members=(), num_open=4) for n in range(4)
    ]
    for number, of_group in enumerate(groups):
        can_take = [
            one
            for one in topology.engines.values()
            if one.state is EngineState.OPEN and one.num_free > 0
        ]
        if not can_take:
            return
        members = known[of_group].num_members_by_engine
        execution = Execution(execution=execution_id(number), group=known[of_group])
        best = topology.best_for(execution)
        near = [one for one in can_take if members.get(one.engine, 0) > 0]
        assert best is min(
            near or can_take,
            key=lambda one: (-members.get(one.engine, 0), -one.num_free, one.stay),
        )
        topology.take_slot(execution.execution, best)
        members[best.engine] = members.get(best.engine, 0) + 1
        assert best.num_free >= 0


def test_displaced_members_of_a_group_meet_again_at_one_engine() -> None:
    desk = Desk(make_config(num_cells=3, slots=4, groups_per_step=4)).start()
    lost = {one.execution for one in desk.given if isinstance(one, c.Launch) and one.engine == "s0"}
    new = desk.lose("s0")
    assert names(new) == ["Reroute"]
    moves = dict(next(one for one in new if isinstance(one, c.Reroute)).moves)
    assert moves.keys() == lost == set(desk.members_by_group[GroupId("g00000")])
    assert len(set(moves.values())) == 1
