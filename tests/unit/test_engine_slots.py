"""KV slots: prefixes are reused where they are, and a cache is given up last."""

import pytest

from opengyre.control.errors import InvariantError
from opengyre.engines.desk import Live
from opengyre.engines.torch_engine.slots import SlotTable
from opengyre.seams.engine import GenerateRequest


def live_of(ids: list[int]) -> Live:
    return Live(
        GenerateRequest(request_id=f"r{ids[0]}", execution="e", prompt_ids=ids, max_new_tokens=9)
    )


def finished(table: SlotTable, ids: list[int]) -> int:
    """A request that was wholly computed and left."""
    live = live_of(ids)
    slot = table.assign(live).slot
    table.num_cached[slot] = table.num_ids[slot]
    table.free(live)
    return slot


def test_the_next_turn_of_an_execution_continues_in_its_own_slot() -> None:
    table = SlotTable(3, 50)
    slot = finished(table, list(range(20)))
    given = table.assign(live_of(list(range(25))))
    assert (given.slot, given.source, given.num_reused) == (slot, slot, 20)
    assert table.num_reused_tokens == 20


def test_a_shared_prefix_is_copied_and_the_longer_cache_is_kept() -> None:
    table = SlotTable(3, 50)
    slot = finished(table, list(range(40)))
    given = table.assign(live_of([*range(10), 99, 98]))
    assert given.source == slot
    assert given.slot != slot
    assert given.num_reused == 10
    assert table.num_cached[slot] == 40


def test_the_prefix_of_a_running_request_is_copied_never_taken() -> None:
    table = SlotTable(2, 50)
    running = live_of(list(range(20)))
    slot = table.assign(running).slot
    table.num_cached[slot] = 12
    given = table.assign(live_of(list(range(20))))
    assert given.slot != slot
    assert (given.source, given.num_reused) == (slot, 12)


def test_the_last_token_is_always_left_to_compute() -> None:
    table = SlotTable(1, 50)
    finished(table, list(range(20)))
    assert table.assign(live_of(list(range(20)))).num_reused == 19


def test_a_prefix_of_a_few_tokens_is_not_worth_a_copy() -> None:
    table = SlotTable(2, 50)
    finished(table, [1, 2, 3, 4, 5])
    assert table.assign(live_of([1, 2, 3, 9, 9, 9])).num_reused == 0


def test_empty_slots_go_first_and_then_the_one_used_longest_ago() -> None:
    table = SlotTable(3, 50)
    used = [finished(table, [10 * k + j for j in range(8)]) for k in range(1, 3)]
    empty = ({0, 1, 2} - set(used)).pop()
    assert table.assign(live_of([91, 92, 93])).slot == empty
    assert table.assign(live_of([81, 82, 83])).slot == used[0]
    assert table.assign(live_of([71, 72, 73])).slot == used[1]
    with pytest.raises(InvariantError, match="no KV slot"):
        table.assign(live_of([61, 62, 63]))


def test_spoiled_and_cleared_slots_are_not_reused() -> None:
    table = SlotTable(1, 50)
    live = live_of(list(range(20)))
    table.num_cached[table.assign(live).slot] = 20
    with pytest.raises(InvariantError, match="running"):
        table.clear()
    table.spoil(live)
    table.free(live)
    again = live_of(list(range(20)))
    assert table.assign(again).num_reused == 0
    table.num_cached[0] = 20
    table.free(again)
    table.clear()
    assert table.assign(live_of(list(range(20)))).num_reused == 0


def test_a_sibling_waits_for_the_prompt_that_is_being_computed_and_then_copies_it() -> None:
    table = SlotTable(3, 50)
    first, second = live_of(list(range(30))), live_of(list(range(30)))
    slot = table.assign(first).slot
    assert table.is_being_computed(second)
    table.num_cached[slot] = 29
    assert not table.is_being_computed(second)
    given = table.assign(second)
    assert (given.source, given.num_reused) == (slot, 29)


def test_nobody_waits_for_a_short_shared_prefix_or_for_one_that_left() -> None:
    table = SlotTable(3, 50)
    first = live_of([*range(10), *range(60, 80)])
    table.assign(first)
    assert not table.is_being_computed(live_of(list(range(30))))
    table.free(first)
    assert not table.is_being_computed(live_of([*range(10), *range(60, 80)]))


def test_a_pinned_slot_is_given_to_nobody_until_it_is_unpinned() -> None:
    table = SlotTable(1, 50)
    live = live_of(list(range(20)))
    slot = table.assign(live).slot
    table.num_cached[slot] = 19
    assert table.pin(live) == (slot, 19)
    table.free(live)
    assert table.num_free == 0
    assert table.reserve(live_of([1, 2, 3, 4, 5])) is None
    table.unpin(slot)
    assert table.assign(live_of(list(range(20)))).num_reused == 19


def test_a_prefix_of_a_few_tokens_is_not_worth_a_pin() -> None:
    table = SlotTable(1, 50)
    live = live_of(list(range(20)))
    table.num_cached[table.assign(live).slot] = 3
    assert table.pin(live) is None
    assert table.slot_of(live) is not None


def test_idle_prefixes_are_those_of_the_executions_asked_for_and_no_part_of_another() -> None:
    table = SlotTable(4, 50)
    long = finished(table, list(range(40)))
    table.num_cached[finished(table, [*range(50, 70)])] = 20
    branch = live_of([*range(10), *range(80, 100)])
    slot = table.assign(branch).slot
    table.num_cached[slot] = 30
    found = table.pin_idle({"e"})
    assert [(one[0], one[1], len(one[2])) for one in found][:1] == [("e", long, 40)]
    assert slot not in [one[1] for one in found]
    assert table.pin_idle({"e"}) == []
    assert table.pin_idle({"other"}) == []


def test_what_arrives_from_elsewhere_is_cached_from_then_on() -> None:
    table = SlotTable(2, 50)
    live = live_of(list(range(20)))
    slot = table.reserve(live)
    assert slot is not None
    assert table.num_reusable(live_of(list(range(20)))) == 0
    table.arrived(live, 19)
    assert table.num_reusable(live_of(list(range(20)))) == 19
