"""Executions that are not over: queued, placed on an engine, displaced, or waiting for a verdict.

Owns: ExecutionState, its transition table, the queue, the displaced, waves of evaluation. Must
not know: engines' capacity, groups' state, time beyond a wave's deadline.
Invariants: an execution closes once; a finished one leaves the book with its last word.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from opengyre.control.errors import InvariantError
from opengyre.control.groups import Group
from opengyre.control.ids import EngineId, ExecutionId, GroupId, execution_id, group_id


class ExecutionState(Enum):
    QUEUED = "queued"
    PLACED = "placed"
    DISPLACED = "displaced"
    CLOSED = "closed"


EXECUTION_TRANSITIONS: dict[ExecutionState, frozenset[ExecutionState]] = {
    ExecutionState.QUEUED: frozenset({ExecutionState.PLACED, ExecutionState.CLOSED}),
    ExecutionState.PLACED: frozenset({ExecutionState.DISPLACED, ExecutionState.CLOSED}),
    ExecutionState.DISPLACED: frozenset({ExecutionState.PLACED, ExecutionState.CLOSED}),
    ExecutionState.CLOSED: frozenset(),
}


@dataclass(slots=True, kw_only=True, eq=False)
class EvalWave:
    """The eval executions of one boundary; `open` ones are not closed or have no last word."""

    version: int
    deadline_s: float
    open: dict[ExecutionId, None]
    is_overdue: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Execution:
    """`engine` holds its slot while placed; `value` is what its group compares, once
    the grader has given its last word; None: it is not valid."""

    execution: ExecutionId
    group: Group | None
    wave: EvalWave | None = None
    state: ExecutionState = ExecutionState.QUEUED
    engine: EngineId | None = None
    has_last_word: bool = False
    value: float | None = None
    is_cancelling: bool = False

    def move(self, state: ExecutionState) -> None:
        if state not in EXECUTION_TRANSITIONS[self.state]:
            raise InvariantError(f"{self.execution}: {self.state.value} -> {state.value}")
        self.state = state


@dataclass(slots=True, kw_only=True)
class ExecutionBook:
    """`queue` and `displaced` are taken from the front: an OrderedDict finds it in one step."""

    by_id: dict[ExecutionId, Execution] = field(default_factory=dict)
    unfinished: dict[ExecutionId, Execution] = field(default_factory=dict)
    queue: OrderedDict[ExecutionId, Execution] = field(default_factory=OrderedDict)
    displaced: OrderedDict[ExecutionId, Execution] = field(default_factory=OrderedDict)
    waves: list[EvalWave] = field(default_factory=list)
    num_dispatched: int = 0
    num_groups: int = 0

    def dispatch_group(self, *, num_members: int, version: int) -> Group:
        members = tuple(self._new_ids(num_members))
        group = Group(
            group=group_id(self.num_groups),
            number=self.num_groups,
            version=version,
            members=members,
            num_open=num_members,
        )
        self.num_groups += 1
        for member in members:
            self._enqueue(Execution(execution=member, group=group))
        return group

    def dispatch_wave(self, *, num_executions: int, version: int, deadline_s: float) -> EvalWave:
        ids = list(self._new_ids(num_executions))
        wave = EvalWave(version=version, deadline_s=deadline_s, open=dict.fromkeys(ids))
        for one in ids:
            self._enqueue(Execution(execution=one, group=None, wave=wave))
        self.waves.append(wave)
        return wave

    def is_known(self, execution: ExecutionId) -> bool:
        """True for every id ever dispatched, finished ones too."""
        number = execution[1:]
        return execution[:1] == "e" and number.isdigit() and int(number) < self.num_dispatched

    def is_group_known(self, group: GroupId) -> bool:
        number = group[1:]
        return group[:1] == "g" and number.isdigit() and int(number) < self.num_groups

    def close(self, execution: Execution) -> None:
        execution.move(ExecutionState.CLOSED)
        del self.unfinished[execution.execution]
        self.queue.pop(execution.execution, None)
        self.displaced.pop(execution.execution, None)

    def forget(self, execution: Execution) -> None:
        """It is closed and has its last word."""
        del self.by_id[execution.execution]
        wave = execution.wave
        if wave is None:
            return
        wave.open.pop(execution.execution, None)
        if not wave.open:
            self.waves.remove(wave)

    def _enqueue(self, execution: Execution) -> None:
        self.by_id[execution.execution] = execution
        self.unfinished[execution.execution] = execution
        self.queue[execution.execution] = execution

    def _new_ids(self, num: int) -> Iterator[ExecutionId]:
        first = self.num_dispatched
        self.num_dispatched += num
        for number in range(first, first + num):
            yield execution_id(number)
