"""A broken engine link that is made again is the same life of the engine."""

import asyncio

import pytest

from opengyre.engines.scripted import ScriptedEngine
from opengyre.gateway.routing import EngineLost, Routing


def routing(incarnation: int) -> Routing:
    one = Routing(on_hold=lambda execution, started: None)
    one.connect_engine("c1", ScriptedEngine(lambda ids, seed: []), incarnation)
    one.set_routes({"e1": "c1"})
    return one


def test_another_connection_keeps_the_incarnation_and_the_door_and_ends_what_ran() -> None:
    async def main() -> None:
        one = routing(4)
        seat = one.open_seat("e1")
        assert seat is not None
        one.close_door("c1")
        again = ScriptedEngine(lambda ids, seed: [])
        one.reconnect_engine("c1", again)
        assert one.open_seat("e1") is None
        one.open_door("c1")
        fresh = one.open_seat("e1")
        assert fresh is not None
        assert (fresh.engine, fresh.incarnation) == (again, 4)
        with pytest.raises(EngineLost), one.lease(seat):
            await asyncio.sleep(0)

    asyncio.run(main())


def test_an_open_door_stays_open_over_a_new_connection() -> None:
    async def main() -> None:
        one = routing(1)
        one.reconnect_engine("c1", ScriptedEngine(lambda ids, seed: []))
        assert one.open_seat("e1") is not None

    asyncio.run(main())
