"""Room for long bodies: bounded, fair, never lost."""

import asyncio

import pytest

from opengyre.gateway.room import NoRoom, Room


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Holder:
    """A task that holds `num_bytes` until it is let go."""

    def __init__(self, room: Room, num_bytes: int) -> None:
        self.is_inside = False
        self.let_go = asyncio.Event()
        self.task = asyncio.ensure_future(self._hold(room, num_bytes))

    async def _hold(self, room: Room, num_bytes: int) -> None:
        async with room.hold(num_bytes, limit_s=5):
            self.is_inside = True
            await self.let_go.wait()


def test_what_does_not_fit_waits_in_order_and_is_not_overtaken() -> None:
    async def main() -> None:
        room = Room(10)
        first, second, third = (Holder(room, n) for n in (6, 6, 1))
        await settle()
        assert [h.is_inside for h in (first, second, third)] == [True, False, False]
        async with room.hold(0, limit_s=1):
            assert not third.is_inside
        first.let_go.set()
        await settle()
        assert [h.is_inside for h in (second, third)] == [True, True]
        for holder in (second, third):
            holder.let_go.set()
        await settle()
        async with room.hold(10, limit_s=1):
            assert second.task.done()

    asyncio.run(main())


def test_one_who_gives_up_waiting_lets_those_behind_it_in() -> None:
    async def main() -> None:
        room = Room(10)
        first, second, third = (Holder(room, n) for n in (6, 10, 2))
        await settle()
        assert not third.is_inside
        second.task.cancel()
        await settle()
        assert third.is_inside
        for holder in (first, third):
            holder.let_go.set()
        await asyncio.wait([first.task, second.task, third.task], timeout=1)

    asyncio.run(main())


def test_one_who_gives_up_waiting_leaves_its_place() -> None:
    async def main() -> None:
        room = Room(10)
        first, second, third = (Holder(room, n) for n in (10, 10, 3))
        await settle()
        second.task.cancel()
        first.let_go.set()
        await settle()
        assert third.is_inside
        third.let_go.set()
        await asyncio.wait([first.task, second.task, third.task], timeout=1)
        async with room.hold(10, limit_s=1):
            assert second.task.cancelled()

    asyncio.run(main())


def test_more_than_all_takes_all() -> None:
    async def main() -> None:
        room = Room(10)
        big, small = Holder(room, 50), Holder(room, 1)
        await settle()
        assert (big.is_inside, small.is_inside) == (True, False)
        big.let_go.set()
        await settle()
        assert small.is_inside
        small.let_go.set()
        await asyncio.wait([big.task, small.task], timeout=1)

    asyncio.run(main())


def test_waiting_ends_at_its_limit() -> None:
    async def main() -> None:
        room = Room(10)
        async with room.hold(10, limit_s=1):
            with pytest.raises(NoRoom):
                async with room.hold(1, limit_s=0.01):
                    pass
        async with room.hold(10, limit_s=1):
            pass

    asyncio.run(main())
