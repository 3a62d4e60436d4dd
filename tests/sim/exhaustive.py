"""Every state that the scheduler can be brought into, by every order of events.

Owns: the search, breadth first, and the search backwards from the ends. Must not know: rules,
events, what makes states equal. A state is the real Scheduler with the world around it; it is
copied in memory by pickle, six times as fast as deepcopy, and never written anywhere.
Invariants: each state's promises are checked on each event that leads to it, before it is folded
into an equal one; a broken one is raised with the events that lead there.
"""

import copyreg
import io
import pickle
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import EnumType
from typing import Any, get_args

from opengyre.control import (
    bursts,
    cells,
    commands,
    executions,
    facts,
    groups,
    step_record,
    transition,
)
from opengyre.control.config import SchedulerConfig
from opengyre.control.errors import InvariantError
from opengyre.control.policies import POLICIES
from opengyre.control.scheduler import Scheduler
from opengyre.control.view import SchedulerView
from tests.sim import exhaustive_world as w
from tests.sim.exhaustive_checks import check_plan, check_state
from tests.sim.exhaustive_key import Keyer

BROKEN = (AssertionError, InvariantError, LookupError, TypeError, ValueError, AttributeError)


@dataclass(slots=True, kw_only=True)
class Found:
    """What one search saw. `stuck` is the path to a state with no way to an end, if any; `seen`
    counts events and commands by name."""

    num_states: int
    num_events: int
    num_ends: int
    depth: int
    stuck: tuple[w.Event, ...] | None
    seen: Counter[str]
    pictures: frozenset[tuple[object, ...]]


class State:
    """The real scheduler and the world around it at one moment."""

    __slots__ = ("now_s", "scheduler", "view", "world")

    def __init__(self, scheduler: Scheduler, world: w.World, now_s: float) -> None:
        self.scheduler, self.world, self.now_s = scheduler, world, now_s
        self.view: SchedulerView | None = None

    def step(self, shape: w.Shape, event: w.Event, seen: Counter[str]) -> None:
        """Observe the facts of `event`, decide, check."""
        if event[0] == "time":
            self.now_s += float(event[1])
        scheduler, world, now_s = self.scheduler, self.world, self.now_s
        for fact in w.happen(world, event, now_s):
            scheduler.observe(fact, now_s)
        self.decide(shape, seen)

    def start(self, shape: w.Shape, seen: Counter[str]) -> tuple[w.Event, ...]:
        """Up to the first dispatch with every door open, in one order."""
        events = []
        for name, machine in self.world.machines.items():
            events.append(("ready", name))
            self.step(shape, events[-1], seen)
            while machine.line:
                events.append(("answer", name))
                self.step(shape, events[-1], seen)
        while any(machine.line for machine in self.world.machines.values()):
            name = next(one.engine for one in self.world.machines.values() if one.line)
            events.append(("answer", name))
            self.step(shape, events[-1], seen)
        return tuple(events)

    def decide(self, shape: w.Shape, seen: Counter[str]) -> None:
        scheduler, world, now_s = self.scheduler, self.world, self.now_s
        w_before = world.num_dispatched - world.num_closed
        plan = scheduler.decide(now_s)
        at_once = []
        for command in plan.commands:
            seen[type(command).__name__] += 1
            at_once += w.take(world, shape, command, now_s)
        for fact in at_once:
            scheduler.observe(fact, now_s)
        again = scheduler.decide(now_s)
        assert again.commands == (), f"decide is not idempotent: {again.commands}"
        wakeup_s = scheduler.next_wakeup_s()
        assert wakeup_s is None or wakeup_s > now_s, "the next wake-up is past"
        view = self.view = scheduler.snapshot()
        w.note_boundary(world, view)
        check_plan(w_before, plan, view, world, shape)
        check_state(scheduler, view, world, shape)


class Shared:
    """What never changes is not copied: configs, policies, commands, members of enums."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[Any, int] = {}
        policies = (type(one) for one in POLICIES.values())
        kinds = (SchedulerConfig, *policies, *get_args(commands.AnyCommand))
        self.table = {**copyreg.dispatch_table, **dict.fromkeys(kinds, self._reduce)}
        for module in (bursts, cells, executions, facts, groups, step_record, transition):
            enums = (one for one in vars(module).values() if isinstance(one, EnumType))
            self.table.update(dict.fromkeys(enums, self._reduce))

    def _reduce(self, value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        index = self._index.get(value)
        if index is None:
            index = self._index[value] = len(self.values)
            self.values.append(value)
        return _shared, (index,)


def _shared(index: int) -> Any:
    return SHARED.values[index]


SHARED = Shared()


class Search:
    """One shape's states. `limit` bounds how many are looked at: more is a failure."""

    def __init__(self, shape: w.Shape, limit: int, *, is_folding: bool = True) -> None:
        self._shape, self._limit = shape, limit
        self._index: dict[bytes, int] = {}
        self._parent = array("l")
        self._by_event: list[w.Event] = []
        self._edges_from, self._edges_to = array("l"), array("l")
        self._ends: list[int] = []
        self._depth = array("l")
        self._pictures: set[tuple[object, ...]] = set()
        self._frontier: deque[tuple[int, bytes]] = deque()
        self._start: tuple[w.Event, ...] = ()
        self.seen: Counter[str] = Counter()
        config = shape.config
        engines = frozenset(spec.engine for spec in config.engines)
        limits_s = (config.supply_hold_s, config.recall_after_s, config.lost_deadline_s)
        horizon_s = max(*limits_s, 2 * config.publish_timeout_s)
        self._keyer = Keyer(engines, horizon_s, is_folding=is_folding)

    def run(self) -> Found:
        state = State(Scheduler(self._shape.config), w.new_world(self._shape), 0.0)
        state.decide(self._shape, self.seen)
        self._start = state.start(self._shape, self.seen) if self._shape.is_started else ()
        self._add(state, -1, ())
        while self._frontier:
            index, blob = self._frontier.popleft()
            self._expand(index, blob)
        stuck = first_without_end(len(self._index), self._edges_from, self._edges_to, self._ends)
        return Found(
            num_states=len(self._index),
            num_events=len(self._edges_to),
            num_ends=len(self._ends),
            depth=max(self._depth),
            stuck=None if stuck is None else self.path(stuck),
            seen=self.seen,
            pictures=frozenset(self._pictures),
        )

    def path(self, index: int) -> tuple[w.Event, ...]:
        events = []
        while index > 0:
            events.append(self._by_event[index])
            index = self._parent[index]
        return (*self._start, *reversed(events))

    def _expand(self, index: int, blob: bytes) -> None:
        state = self._copy(blob)
        wakeup_s = state.scheduler.next_wakeup_s()
        events = list(w.possible(state.world, self._shape, state.now_s, wakeup_s))
        assert events or state.world.end is not None, f"nothing can happen: {self.path(index)}"
        for number, event in enumerate(events):
            self.seen[str(event[0])] += 1
            if number > 0:
                state = self._copy(blob)
            try:
                state.step(self._shape, event, self.seen)
            except BROKEN as error:
                path = (*self.path(index), event)
                error.add_note(f"{self._shape.name}, after {len(path)} events: {path}")
                raise
            self._edges_from.append(index)
            self._edges_to.append(self._add(state, index, event))

    def _add(self, state: State, parent: int, event: w.Event) -> int:
        key = self._keyer.key(state.scheduler._run, state.world, state.now_s)
        found = self._index.get(key)
        if found is not None:
            return found
        index = self._index[key] = len(self._index)
        assert index < self._limit, f"more than {self._limit} states"
        if state.view is not None:
            self._pictures.add(picture(state.view))
        self._parent.append(parent)
        self._by_event.append(event)
        self._depth.append(0 if parent < 0 else self._depth[parent] + 1)
        if state.world.end is not None:
            self._ends.append(index)
        else:
            self._frontier.append((index, self._blob(state)))
        return index

    def _blob(self, state: State) -> bytes:
        into = io.BytesIO()
        pickler = pickle.Pickler(into, protocol=5)
        pickler.dispatch_table = SHARED.table
        pickler.dump((state.scheduler, state.world, state.now_s))
        return into.getvalue()

    def _copy(self, blob: bytes) -> State:
        return State(*pickle.loads(blob))


def first_without_end(
    num_states: int, sources: Sequence[int], targets: Sequence[int], ends: Sequence[int]
) -> int | None:
    """The first state from which no end is reached, found backwards from the ends."""
    before: list[list[int]] = [[] for _ in range(num_states)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    is_good = bytearray(num_states)
    todo = list(ends)
    while todo:
        index = todo.pop()
        if not is_good[index]:
            is_good[index] = 1
            todo.extend(before[index])
    return next((index for index, is_fine in enumerate(is_good) if not is_fine), None)


def explore(shape: w.Shape, limit: int, *, is_folding: bool = True) -> Found:
    return Search(shape, limit, is_folding=is_folding).run()


def picture(view: SchedulerView) -> tuple[object, ...]:
    """What can be seen of a state without a name in it."""
    engines = tuple((one.state, one.num_used, one.verified_version) for one in view.engines)
    groups = (view.num_live, view.num_ready, view.num_assigned, view.num_void, view.num_consumed)
    ended = (view.num_filtered, view.num_dropped)
    step = (view.step, view.step_state, view.steps_done, view.version, view.published_version)
    return (view.phase, view.role_by_cell, engines, view.num_queued, groups, ended, step)
