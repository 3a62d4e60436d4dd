"""Doors and routes: who waits, who is told, who is counted."""

import asyncio
from collections.abc import Callable

import pytest

from opengyre.engines.scripted import ScriptedEngine
from opengyre.gateway.routing import EngineLost, NoEngine, Routing, Seat

Hold = tuple[str, bool]


def routing(*engines: str) -> tuple[Routing, list[Hold]]:
    holds: list[Hold] = []
    one = Routing(on_hold=lambda execution, started: holds.append((execution, started)))
    for engine in engines:
        one.connect_engine(engine, ScriptedEngine(lambda ids, seed: []), 1)
    return one, holds


async def waited(one: Routing, *changes: Callable[[], None]) -> str:
    """The engine that a waiting request gets once `changes` were made, one after the other."""
    task = asyncio.create_task(one.wait_open("e1", limit_s=5))
    for change in changes:
        await asyncio.sleep(0)
        assert not task.done()
        change()
    return (await task).engine_id


async def leased(one: Routing, seat: Seat) -> None:
    with one.lease(seat) as lease:
        await lease.wait_for(asyncio.Event().wait())


def test_a_wait_ends_at_the_engine_routed_when_a_door_opens() -> None:
    async def main() -> None:
        one, _ = routing("c1", "s0")
        one.set_routes({"e1": "c1"})
        assert (await one.wait_open("e1", limit_s=0)).engine_id == "c1"
        one.close_door("c1")
        assert await waited(one, lambda: one.open_door("c1")) == "c1"
        one.close_door("c1")
        assert await waited(one, lambda: one.set_routes([("e1", "s0")])) == "s0"

    asyncio.run(main())


def test_a_lost_engine_serves_again_only_as_a_new_incarnation() -> None:
    async def main() -> None:
        one, _ = routing("c1")
        one.set_routes({"e1": "c1"})
        one.engine_lost("c1")
        one.open_door("c1")
        again = ScriptedEngine(lambda ids, seed: [])
        assert await waited(one, lambda: one.connect_engine("c1", again, 2)) == "c1"
        seat = one.open_seat("e1")
        assert seat is not None
        assert (seat.incarnation, seat.engine) == (2, again)

    asyncio.run(main())


def test_a_cancelled_wait_stays_cancelled_also_when_its_engine_is_lost_at_that_moment() -> None:
    async def main() -> None:
        one, _ = routing("c1")
        one.set_routes({"e1": "c1"})
        seat = one.open_seat("e1")
        assert seat is not None
        task = asyncio.create_task(leased(one, seat))
        await asyncio.sleep(0)
        one.engine_lost("c1")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_lease_ends_at_once_when_its_engine_is_lost_and_cannot_begin_after_it() -> None:
    async def main() -> None:
        one, _ = routing("c1")
        one.set_routes({"e1": "c1"})
        seat = await one.wait_open("e1", limit_s=0)
        asyncio.get_running_loop().call_soon(one.engine_lost, "c1")
        with pytest.raises(EngineLost):
            await leased(one, seat)
        with pytest.raises(EngineLost):
            await leased(one, seat)

    asyncio.run(main())


def test_holds_are_told_once_for_each_execution() -> None:
    async def main() -> None:
        one, holds = routing()
        with one.hold("e1"), one.hold("e2"):
            with one.hold("e1"):
                assert one.held() == {"e1": 2, "e2": 1}
            assert holds == [("e1", True), ("e2", True)]
        assert holds[2:] == [("e2", False), ("e1", False)]
        assert one.held() == {}

    asyncio.run(main())


def test_a_wait_is_bounded() -> None:
    async def main() -> None:
        one, _ = routing("c1")
        with pytest.raises(NoEngine):
            await one.wait_open("e1", limit_s=0.01)

    asyncio.run(main())
