"""Pins end exactly once, whoever comes first."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from opengyre.engines.leases import Leases
from opengyre.seams.kv import KVRelease

SHORT_S = 0.02


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def leases(lease_s: float = 60.0) -> tuple[Leases, list[str]]:
    return Leases(name="c1#0", lease_s=lease_s), []


def test_a_release_ends_the_pin_and_the_second_one_knows_nothing() -> None:
    async def story() -> None:
        pins, ended = leases()
        ref = pins.new_ref()
        pins.add(ref, lambda: ended.append(ref))
        assert [pins.release(ref), pins.release(ref)] == [KVRelease.RELEASED, KVRelease.UNKNOWN]
        assert (ended, len(pins)) == ([ref], 0)

    run(story())


def test_a_lease_ends_by_its_own_clock_and_a_late_release_hears_how() -> None:
    async def story() -> None:
        pins, ended = leases(SHORT_S)
        ref = pins.new_ref()
        pins.add(ref, lambda: ended.append(ref))
        await pins.wait_none()
        assert ended == [ref]
        assert [pins.release(ref), pins.release(ref)] == [KVRelease.LEASE_ENDED, KVRelease.UNKNOWN]

    run(story())


def test_a_released_pin_is_not_ended_again_by_its_clock() -> None:
    async def story() -> None:
        pins, ended = leases(SHORT_S)
        ref = pins.new_ref()
        pins.add(ref, lambda: ended.append(ref))
        pins.release(ref)
        await asyncio.sleep(3 * SHORT_S)
        assert ended == [ref]

    run(story())


@pytest.mark.parametrize("num_pins", [1, 3])
def test_new_weights_drop_every_pin_and_whoever_waits_goes_on(num_pins: int) -> None:
    async def story() -> None:
        pins, ended = leases()
        refs = [pins.new_ref() for _ in range(num_pins)]
        for ref in refs:
            pins.add(ref, lambda ref=ref: ended.append(ref))
        waiting = asyncio.create_task(pins.wait_none())
        await asyncio.sleep(0)
        assert not waiting.done()
        pins.drop_all()
        await waiting
        assert ended == refs
        assert {pins.release(ref) for ref in refs} == {KVRelease.DROPPED}

    run(story())


def test_the_oldest_pin_gives_way_first() -> None:
    async def story() -> None:
        pins, ended = leases()
        for _ in range(2):
            ref = pins.new_ref()
            pins.add(ref, lambda ref=ref: ended.append(ref))
        assert [pins.drop_oldest(), pins.drop_oldest(), pins.drop_oldest()] == [True, True, False]
        assert ended == ["c1#0.kv1", "c1#0.kv2"]

    run(story())


def test_references_are_unique_over_lives_without_a_name() -> None:
    assert Leases(name="", lease_s=1).new_ref() != Leases(name="", lease_s=1).new_ref()
