"""All orders of what can happen to one handed over request, each an action on three engines.

Events whose order makes no difference (an import of what nobody exported) are left out.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import permutations
from pathlib import Path
from typing import Any

from engine_under_test import prompt_of
from handoff_rig import (
    LAST_VERSION,
    Heard,
    Kind,
    ask,
    hear,
    hear_some,
    make_engine,
    nothing_left,
    rest_of,
    until,
)

from opengyre.engines.compute import ComputeThread
from opengyre.seams.engine import Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVRelease
from opengyre.transport.engine_link import RemoteEngine
from opengyre.transport.engine_server import EngineServer

LEASE_S = 0.15
NUM_TOKENS = 40


class Event(StrEnum):
    """COMPLETION: the stream that runs now is read to its end; then the reader lets go."""

    EXPORT = "export"
    IMPORT = "import"
    CANCEL = "cancel"
    SOURCE_DEATH = "source death"
    DESTINATION_DEATH = "destination death"
    LEASE_END = "lease end"
    COMPLETION = "completion"


Order = tuple[Event, ...]


def all_orders() -> list[Order]:
    return [
        order
        for size in range(len(Event) + 1)
        for order in permutations(Event, size)
        if _is_meaningful(order)
    ]


def _is_meaningful(order: Order) -> bool:
    places = {event: number for number, event in enumerate(order)}

    def precedes(first: Event, second: Event) -> bool:
        return first in places and second in places and places[first] < places[second]

    if Event.LEASE_END in places and not precedes(Event.EXPORT, Event.LEASE_END):
        return False
    if precedes(Event.SOURCE_DEATH, Event.EXPORT):
        return False
    if Event.IMPORT not in places:
        return True
    if not precedes(Event.EXPORT, Event.IMPORT):
        return False
    spoils = (Event.CANCEL, Event.COMPLETION)
    return not any(precedes(one, Event.EXPORT) for one in spoils) and not precedes(
        Event.DESTINATION_DEATH, Event.IMPORT
    )


@dataclass(slots=True, kw_only=True)
class Seat:
    """An engine behind a link; `die` cuts the link and drops the engine."""

    engine: Any
    server: EngineServer
    front: RemoteEngine
    is_alive: bool = True

    async def die(self) -> None:
        self.is_alive = False
        engine, self.engine = self.engine, None
        await self.server.__aexit__(None, None, None)
        await engine.pause()
        await engine.begin_update(LAST_VERSION)
        await engine.release()

    async def release(self, ref: str) -> KVRelease | None:
        """None: it is lost, and says so by an error of the boundary."""
        try:
            async with asyncio.timeout(5):
                return await self.front.release_kv(ref)
        except BoundaryError:
            assert not self.is_alive
            return None


@asynccontextmanager
async def open_seat(engine: Any, address: str) -> Any:
    async with AsyncExitStack() as stack:
        server = EngineServer(engine, address)
        await server.__aenter__()
        front = await stack.enter_async_context(RemoteEngine(server.address, name=address))
        seat = Seat(engine=engine, server=server, front=front)
        yield seat
        if seat.is_alive:
            await seat.die()


@dataclass(slots=True, kw_only=True)
class Story:
    """One request at a source, and what is done to it."""

    asked: GenerateRequest
    source: Seat
    destination: Seat
    third: Seat
    streams: list[Any] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    ref: KVRef | None = None
    has_released: bool = False

    @property
    def seat(self) -> Seat:
        return self.source if len(self.streams) == 1 else self.destination

    @property
    def ids(self) -> list[int]:
        return [one for heard in self.heard for one in heard.ids]

    async def begin(self) -> None:
        self.streams.append(self.source.front.submit(self.asked))
        self.heard.append(await hear_some(self.streams[0], 2))

    async def do(self, event: Event) -> None:
        match event:
            case Event.EXPORT:
                await self._export()
            case Event.IMPORT:
                rest = rest_of(self.asked, self.heard[0], kv=self.ref)
                self.streams.append(self.destination.front.submit(rest))
                self.heard.append(Heard())
            case Event.CANCEL:
                await self._cancel()
            case Event.SOURCE_DEATH:
                await self.source.die()
            case Event.DESTINATION_DEATH:
                await self.destination.die()
            case Event.LEASE_END:
                await asyncio.sleep(LEASE_S * 1.2)
            case Event.COMPLETION:
                await self._complete()

    async def _export(self) -> None:
        await self.source.front.freeze(self.asked.request_id, keeps_kv=True)
        await self._read_on()
        assert self.heard[0].end is not None
        self.ref = self.heard[0].end.kv
        assert (self.ref is not None) is (self.heard[0].finish is Finish.FROZEN)

    async def _cancel(self) -> None:
        if self.seat.is_alive:
            name = self.asked.request_id + "+" * (len(self.streams) - 1)
            await self.seat.front.cancel(name)

    async def _complete(self) -> None:
        await self._read_on()
        if self.ref is not None:
            first, again = [await self.source.release(self.ref.ref) for _ in range(2)]
            self.has_released = True
            assert again in (KVRelease.UNKNOWN, None)
            assert (first is None) is not self.source.is_alive

    async def _read_on(self) -> None:
        heard = self.heard[-1]
        if heard.end is None:
            await hear(self.streams[-1], heard)

    async def finish(self, whole: list[int]) -> None:
        """What is still to read is read; the rest comes from somewhere; nothing is left."""
        await self._read_on()
        for heard, stream in zip(self.heard, self.streams, strict=True):
            assert heard.end is not None
            assert [one async for one in stream] == []
        self._check_taken()
        assert self.ids == whole[: len(self.ids)]
        await self._go_on_elsewhere(whole)
        await self._nothing_left()

    def _check_taken(self) -> None:
        heard = self.heard[-1]
        if len(self.heard) == 2 and heard.ids:
            assert heard.taken is not None
        if self.ref is not None and heard.taken is not None:
            assert heard.taken.num_tokens in (0, self.ref.num_tokens)
            assert (heard.taken.num_tokens == 0) is bool(heard.taken.reason)

    async def _go_on_elsewhere(self, whole: list[int]) -> None:
        known = self.ids
        num_left = NUM_TOKENS - len(known)
        if not num_left:
            return
        ref = self.ref if self.ref and self.ids == self.heard[0].ids else None
        rest = rest_of(self.asked, Heard(ids=known), kv=ref)
        last = await hear(self.third.front.submit(rest))
        assert known + last.ids == whole
        assert (last.taken is None) is (ref is None)

    async def _nothing_left(self) -> None:
        has_lease_end = self.source.is_alive and self.ref is not None
        if has_lease_end and not self.has_released and self.ref and self.ref.lease_s > LEASE_S:
            assert await self.source.release(self.ref.ref) is KVRelease.RELEASED
            assert await self.source.release(self.ref.ref) is KVRelease.UNKNOWN
        for seat in (self.source, self.destination, self.third):
            if seat.is_alive:
                await _until_idle(seat.engine)
                await nothing_left(seat.engine)


async def _until_idle(engine: Any) -> None:
    def is_idle() -> bool:
        return not engine.stats().num_running and not engine.stats().num_waiting

    await until(is_idle, what="an idle engine")


async def play_order(
    kind: Kind, order: Order, computes: list[ComputeThread], folder: Path, number: int
) -> None:
    """Raises what went wrong, with the order as a note."""
    lease_s = LEASE_S if Event.LEASE_END in order else 30.0
    asked = ask(prompt_of(24, seed=number), NUM_TOKENS, temperature=1.0, seed=number)
    try:
        async with AsyncExitStack() as stack:
            seats = [
                await stack.enter_async_context(
                    open_seat(
                        make_engine(
                            kind,
                            compute,
                            name=f"o{number}.{role}",
                            kv_lease_s=lease_s,
                            tokens_per_s=400.0,
                        ),
                        f"unix:{folder}/{number}.{role}",
                    )
                )
                for role, compute in zip("sdt", computes, strict=True)
            ]
            whole = await hear(seats[2].front.submit(asked))
            story = Story(asked=asked, source=seats[0], destination=seats[1], third=seats[2])
            await story.begin()
            for event in order:
                await story.do(event)
            await story.finish(whole.ids)
    except Exception as error:
        error.add_note(f"order {number}: {', '.join(order) or 'nothing'}")
        raise


def batches(orders: list[Order], size: int) -> Iterator[list[tuple[int, Order]]]:
    numbered = list(enumerate(orders))
    for start in range(0, len(numbered), size):
        yield numbered[start : start + size]
