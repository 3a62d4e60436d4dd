"""An event loop in virtual time that chooses, by a seed, which ready callback runs next.

Owns: the clock, the choice, the digest of a run, host states. Must not know: what runs in it.
Invariants: time moves only when nothing is ready; one callback a turn; the same (seed, mode) and
the same program give the same digest; when nothing can ever run again it says who waits for what.
"""

import asyncio
import heapq
import math
import random
import struct
import warnings
import zlib
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from enum import StrEnum
from typing import Any

_STEP = struct.Struct("<dII")
_CHANGE_RATE = 0.02
MAX_STEPS_AT_ONE_TIME = 200_000
MAX_BURIAL_S = 1000.0
GRID_HZ = 2**20


class Mode(StrEnum):
    """How the next callback is chosen among those that are ready."""

    FIFO = "fifo"
    SHUFFLE = "shuffle"
    PRIORITY = "random-priority"


class Deadlock(Exception):
    """Nothing is ready and no timer is left; the text names the waiting tasks."""


class Host:
    """What stands for one process: its callbacks run, wait (stopped), or never run (dead)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.waiting: list[events.Handle] = []
        self.death = asyncio.Event()


HOST: ContextVar[Host | None] = ContextVar("HOST", default=None)


class SeededTask(asyncio.Task):  # type: ignore[type-arg]
    """Hashed by its number: sets of tasks have the same order in every run."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **how: Any) -> None:
        self.number = number
        self.priority = 0.0
        self.born_at_step = -1
        self.has_begun = False
        context: Context | None = how.get("context")
        self.host = HOST.get() if context is None else context.get(HOST)
        super().__init__(coro, **how)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SeededLoop(asyncio.BaseEventLoop):
    """`order` decides what runs next; `world` is for whoever lives in it. `after_step` is called
    after each callback."""

    def __init__(self, *, seed: int, mode: Mode) -> None:
        super().__init__()
        self.mode = mode
        self.order = random.Random(f"order/{mode}/{seed}")
        self.world = random.Random(f"world/{seed}")
        self.num_steps = 0
        self.digest = 0
        self.after_step: Callable[[], None] = lambda: None
        self.errors: list[str] = []
        self._now_s = 0.0
        self._num_tasks = 0
        self._num_at_once = 0
        self._is_burying = False
        self._parked: list[events.Handle] = []
        self._ready: list[events.Handle] = []  # type: ignore[assignment]
        self._num_timers = 0
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self._now_s

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:  # type: ignore[override]
        """On a grid of about a microsecond, never early: two events can be at one time."""
        when_s = math.ceil(when * GRID_HZ) / GRID_HZ
        timer = events.TimerHandle(when_s, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when_s, self._num_timers, timer))
        return timer

    def some_deadline_s(self, within_s: float) -> float | None:
        """When some timer fires soon, for an event that is to fall on a deadline."""
        for _ in range(4):
            if self._timers:
                when_s, _, one = self._timers[int(self.world.random() * len(self._timers))]
                left_s = when_s - self._now_s
                if 0 < left_s <= within_s and not one.cancelled():
                    return left_s
        return None

    def resume_host(self, host: Host) -> None:
        """A stopped host goes on; what became ready meanwhile is ready now."""
        host.is_stopped = False
        waiting, host.waiting = host.waiting, []
        self._ready += waiting

    def bury(self) -> None:
        """End every task that is left, those of dead hosts too; then close."""
        self._is_burying = True
        self.after_step = lambda: None
        self._ready += self._parked
        with warnings.catch_warnings():
            # What the dead were about to start is never awaited.
            warnings.simplefilter("ignore", RuntimeWarning)
            left = asyncio.all_tasks(self)
            for task in sorted(left, key=lambda one: getattr(one, "number", 0)):
                task.cancel()
            if left:
                self.run_until_complete(asyncio.wait(left, timeout=MAX_BURIAL_S))
            self.run_until_complete(self.shutdown_asyncgens())
            self.close()

    def _make_task(
        self, loop: Any, coro: Any, context: Context | None = None
    ) -> "asyncio.Task[Any]":
        self._num_tasks += 1
        task = SeededTask(coro, number=self._num_tasks, loop=loop, context=context)
        task.priority = self.order.random()
        task.born_at_step = self.num_steps
        return task

    def _note_error(self, loop: Any, context: dict[str, Any]) -> None:
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    def _run_once(self) -> None:
        self._release_due()
        if not self._ready:
            self._advance()
        index = self._choose()
        handle = self._ready.pop(index)
        if handle._cancelled:  # type: ignore[attr-defined]
            return
        host = handle._context.get(HOST)  # type: ignore[attr-defined]
        if host is not None and (host.is_dead or host.is_stopped) and not self._is_burying:
            (self._parked if host.is_dead else host.waiting).append(handle)
            return
        self.num_steps += 1
        self._num_at_once += 1
        if self._num_at_once > MAX_STEPS_AT_ONE_TIME:
            raise Deadlock(f"{self._num_at_once} callbacks at {self._now_s} s: {handle!r}")
        step = _STEP.pack(self._now_s, index, len(self._ready))
        self.digest = zlib.crc32(step, self.digest)
        owner = _owner(handle)
        if owner is not None:
            owner.has_begun = True
        handle._run()
        self.after_step()

    def _choose(self) -> int:
        if self.mode is Mode.FIFO or len(self._ready) == 1:
            return 0
        if self.mode is Mode.SHUFFLE:
            return self._elder(int(self.order.random() * len(self._ready)))
        return self._elder(self._choose_by_priority())

    def _elder(self, index: int) -> int:
        """Tasks begin in the order in which one callback made them, as asyncio promises."""
        chosen = _owner(self._ready[index])
        if chosen is None or chosen.has_begun:
            return index
        for k, handle in enumerate(self._ready[:index]):
            other = _owner(handle)
            if other is None or other.has_begun:
                continue
            if other.born_at_step == chosen.born_at_step:
                return k
        return index

    def _choose_by_priority(self) -> int:
        priorities = [self._priority(handle) for handle in self._ready]
        index = priorities.index(max(priorities))
        owner = _owner(self._ready[index])
        if owner is not None and self.order.random() < _CHANGE_RATE:
            owner.priority = self.order.random()
        return index

    def _priority(self, handle: events.Handle) -> float:
        owner = _owner(handle)
        return self.order.random() if owner is None else owner.priority

    def _release_due(self) -> None:
        timers, now_s = self._timers, self._now_s
        while timers and (timers[0][0] <= now_s or timers[0][2].cancelled()):
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)

    def _advance(self) -> None:
        if not self._timers:
            raise Deadlock("nothing will ever run: " + "; ".join(waiting_tasks(self)))
        self._now_s = self._timers[0][0]
        self._num_at_once = 0
        self._release_due()

    def _timer_handle_cancelled(self, handle: Any) -> None:
        return

    def _process_events(self, event_list: Any) -> None:
        return

    def _write_to_self(self) -> None:
        return


def _owner(handle: events.Handle) -> SeededTask | None:
    """The task whose step this is."""
    found = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return found if isinstance(found, SeededTask) else None


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Each unfinished task of a living host: where it stands."""
    found = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda one: getattr(one, "number", 0)):
        host = getattr(task, "host", None)
        if host is not None and host.is_dead:
            continue
        found.append(f"{task.get_name()} {_where(task)}")
    return found


def _where(task: "asyncio.Task[Any]") -> str:
    places = []
    at: Any = task.get_coro()
    while at is not None and getattr(at, "cr_frame", getattr(at, "gi_frame", None)) is not None:
        frame = getattr(at, "cr_frame", None) or at.gi_frame
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        at = getattr(at, "cr_await", getattr(at, "gi_yieldfrom", None))
    return " > ".join(places[-3:])
