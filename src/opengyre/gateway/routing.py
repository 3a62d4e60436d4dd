"""Doors and routes: which engine serves an execution now, and who waits at a closed door.

Must not know: HTTP, tokens, roles. Invariants: nothing is given an engine whose door is closed or
that was lost; everyone who waits is counted in `held` and waits at most the limit given; a wait
ends with the engine routed at that moment, never with the one it began with.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from opengyre.seams.engine import RequestEngine

_T = TypeVar("_T")


class NoEngine(Exception):
    """No open engine for this execution within the limit; `waited_s` says how long."""

    def __init__(self, execution: str, waited_s: float) -> None:
        super().__init__(f"no engine was free for {execution} in {waited_s:.0f} s")
        self.waited_s = waited_s


class EngineLost(Exception):
    """The engine was declared lost while a request waited for its next chunk."""

    def __init__(self, engine_id: str, how: str = "was lost") -> None:
        super().__init__(f"{engine_id} {how}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """An open engine of one incarnation."""

    engine_id: str
    incarnation: int
    engine: RequestEngine


class Lease:
    """One request at one seat. One `wait_for` at a time."""

    __slots__ = ("_is_lost", "_seat", "_task")

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._is_lost = False
        self._task: asyncio.Task[Any] | None = None

    def lose(self) -> None:
        """The seat is lost: who waits is woken, who comes later does not wait."""
        self._is_lost = True
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def wait_for(self, awaitable: Awaitable[_T]) -> _T:
        """Raises EngineLost when the seat is lost, before or meanwhile."""
        if self._is_lost:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise EngineLost(self._seat.engine_id)
        task = self._task = asyncio.current_task()
        assert task is not None, "only tasks wait"
        num_before = task.cancelling()
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._is_lost and self._task is None and task.uncancel() <= num_before:
                raise EngineLost(self._seat.engine_id) from None
            raise
        finally:
            self._task = None


class _Door:
    __slots__ = ("is_open", "leases", "seat")

    def __init__(self, seat: Seat, *, is_open: bool) -> None:
        self.seat = seat
        self.is_open = is_open
        self.leases: dict[Lease, None] = {}


class Routing:
    """`on_hold(execution, started)` is called when the first wait of an execution begins and
    when its last one ends."""

    def __init__(self, *, on_hold: Callable[[str, bool], None]) -> None:
        self._on_hold = on_hold
        self._doors: dict[str, _Door] = {}
        self._routes: dict[str, str] = {}
        self._num_held: dict[str, int] = {}
        self._changed = asyncio.Event()

    def connect_engine(self, engine_id: str, engine: RequestEngine, incarnation: int) -> None:
        """A new life of an engine; its door is open, whoever waited for the old one is told."""
        self.engine_lost(engine_id)
        seat = Seat(engine_id=engine_id, incarnation=incarnation, engine=engine)
        self._doors[engine_id] = _Door(seat, is_open=True)
        self._tell()

    def reconnect_engine(self, engine_id: str, engine: RequestEngine) -> None:
        """Another connection to the same life: its door stays as it is."""
        old = self._doors[engine_id]
        self.connect_engine(engine_id, engine, old.seat.incarnation)
        self._doors[engine_id].is_open = old.is_open

    def close_door(self, engine_id: str) -> None:
        """Unknown engines are fine: they are closed."""
        if engine_id in self._doors:
            self._doors[engine_id].is_open = False

    def open_door(self, engine_id: str) -> None:
        if engine_id in self._doors:
            self._doors[engine_id].is_open = True
            self._tell()

    def engine_lost(self, engine_id: str) -> None:
        """Forget it; requests that wait for its chunks get EngineLost now."""
        door = self._doors.pop(engine_id, None)
        if door is not None:
            for lease in door.leases:
                lease.lose()

    def set_routes(self, routes: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        self._routes.update(routes)
        self._tell()

    def forget(self, execution: str) -> None:
        self._routes.pop(execution, None)
        self._tell()

    def held(self) -> dict[str, int]:
        """How many requests of each execution are held."""
        return dict(self._num_held)

    def open_seat(self, execution: str) -> Seat | None:
        door = self._doors.get(self._routes.get(execution, ""))
        return door.seat if door is not None and door.is_open else None

    def seat_of(self, engine_id: str, incarnation: int) -> Seat | None:
        """The present connection to this life of an engine, its door open or not."""
        door = self._doors.get(engine_id)
        is_it = door is not None and door.seat.incarnation == incarnation
        return door.seat if door is not None and is_it else None

    async def wait_open(self, execution: str, *, limit_s: float) -> Seat:
        """The engine routed for `execution`, once its door is open. Raises NoEngine."""
        seat = self.open_seat(execution)
        if seat is not None:
            return seat
        try:
            async with asyncio.timeout(limit_s):
                while (seat := self.open_seat(execution)) is None:
                    await self._changed.wait()
        except TimeoutError as error:
            raise NoEngine(execution, limit_s) from error
        return seat

    @contextmanager
    def hold(self, execution: str) -> Iterator[None]:
        """Count one request of `execution` as held by us."""
        self._num_held[execution] = self._num_held.get(execution, 0) + 1
        if self._num_held[execution] == 1:
            self._on_hold(execution, True)
        try:
            yield
        finally:
            self._num_held[execution] -= 1
            if self._num_held[execution] == 0:
                del self._num_held[execution]
                self._on_hold(execution, False)

    @contextmanager
    def lease(self, seat: Seat) -> Iterator["Lease"]:
        """What is waited for through the lease ends at once when `seat` is lost. Raises EngineLost
        if it already is."""
        door = self._doors.get(seat.engine_id)
        if door is None or door.seat is not seat:
            raise EngineLost(seat.engine_id)
        lease = Lease(seat)
        door.leases[lease] = None
        try:
            yield lease
        finally:
            door.leases.pop(lease, None)

    def _tell(self) -> None:
        """Wake everyone who waits; each looks for itself."""
        self._changed.set()
        self._changed = asyncio.Event()
