"""What the controller knows of each execution beyond its counts: task, group, turns, verdict.

Owns: the way from dispatched groups to training rows' inputs. Invariants: an execution belongs
to at most one group; turns are kept in the order in which they were recorded.
"""

import zlib
from dataclasses import dataclass, field
from enum import StrEnum

from opengyre.seams.records import TurnRecord
from opengyre.seams.tasks import Task, TaskSource
from opengyre.trajectory.account import Reason


class HeldBy(StrEnum):
    """Why an execution waits for us: its gateway holds a request of it, or is itself gone."""

    REQUEST = "request"
    DEATH = "death"


class HeldTime:
    """How long we held an execution; overlapping causes count once (DESIGN 2.5.6)."""

    def __init__(self) -> None:
        self._causes: set[HeldBy] = set()
        self._since_s = 0.0
        self._total_s = 0.0

    def set(self, cause: HeldBy, is_held: bool, now_s: float) -> None:
        """Telling a cause twice changes nothing."""
        was_held = bool(self._causes)
        if is_held:
            self._causes.add(cause)
        else:
            self._causes.discard(cause)
        if self._causes and not was_held:
            self._since_s = now_s
        elif was_held and not self._causes:
            self._total_s += now_s - self._since_s

    def total_s(self, now_s: float) -> float:
        return self._total_s + (now_s - self._since_s if self._causes else 0.0)


@dataclass(slots=True)
class Execution:
    """`group` is None for an eval execution. `turns` are those of the present launch, after the
    `first_turn` turns of earlier ones, which are in `given_up`; `told` are (turn, attempt) of all
    launches. `is_cut`: its gateway died and no turn of it came since. `reward` is raw, `shaped`
    None where no transform applied; `exclusion`: why it takes no part in its group though it has a
    reward; `masked`: why none of its tokens is trained though it takes part."""

    execution: str
    task: Task
    group: str | None
    burst: int
    version: int
    seed: int
    turns: list[TurnRecord] = field(default_factory=list)
    given_up: list[TurnRecord] = field(default_factory=list)
    told: set[tuple[str, int]] = field(default_factory=set)
    first_turn: int = 0
    last_turn: int = 0
    is_cut: bool = False
    held: HeldTime = field(default_factory=HeldTime)
    reward: float | None = None
    shaped: float | None = None
    exclusion: Reason | None = None
    masked: Reason | None = None
    has_verdict: bool = False
    num_launches: int = 0

    @property
    def value(self) -> float | None:
        """What its group compares; None: it takes no part."""
        if self.exclusion is not None:
            return None
        return self.reward if self.shaped is None else self.shaped


def turn_number(turn: str) -> int:
    """7 of "e000123.t7"."""
    return int(turn.rpartition(".t")[2])


class Book:
    """All executions of a run by id, and the members of each group in dispatch order."""

    def __init__(self, *, train: TaskSource, evaluation: TaskSource | None, seed: int) -> None:
        self._train = train
        self._evaluation = evaluation
        self._seed = seed
        self.executions: dict[str, Execution] = {}
        self.members: dict[str, tuple[str, ...]] = {}
        self._kept: dict[str, None] = {}
        self.evals: dict[int, list[Execution]] = {}

    def add_group(self, group: str, members: tuple[str, ...], *, burst: int, version: int) -> Task:
        """Register a dispatched group; the group's number chooses its task."""
        task = self._train.task_for_group(int(group[1:]))
        self.members[group] = members
        self._kept[group] = None
        for name in members:
            self._add(name, task, group=group, burst=burst, version=version)
        return task

    def add_eval(self, executions: tuple[str, ...], *, burst: int, version: int) -> None:
        """Register eval executions: the i-th plays the i-th held-out task."""
        if self._evaluation is None:
            raise ValueError("eval was dispatched without eval tasks")
        for index, name in enumerate(executions):
            task = self._evaluation.task_for_group(index)
            self._add(name, task, group=None, burst=burst, version=version)
        self.evals[burst] = [self.executions[name] for name in executions]

    def cancel_queued(self, name: str) -> Execution:
        """It was never launched and gets no verdict."""
        one = self.executions[name]
        one.has_verdict = True
        return one

    def tell_turn(self, turn: TurnRecord) -> bool:
        """False if it was told before: a gateway that died and came back tells some again."""
        one = self.executions[turn.execution]
        if (turn.turn, turn.attempt) in one.told:
            return False
        one.told.add((turn.turn, turn.attempt))
        one.is_cut = False
        number = turn_number(turn.turn)
        one.last_turn = max(one.last_turn, number)
        (one.turns if number > one.first_turn else one.given_up).append(turn)
        return True

    def begin_launch(self, one: Execution) -> None:
        """Turn numbers go on; what an earlier launch told is not trained."""
        one.num_launches += 1
        one.first_turn = one.last_turn
        one.is_cut = False
        one.given_up += one.turns
        one.turns.clear()

    def kept_groups(self) -> tuple[str, ...]:
        """Those that were not forgotten, in dispatch order."""
        return tuple(self._kept)

    def forget_group(self, group: str) -> None:
        """A consumed or void group needs no turns any more; memory stays bounded."""
        self._kept.pop(group, None)
        for name in self.members[group]:
            one = self.executions[name]
            one.turns.clear()
            one.given_up.clear()
            one.told.clear()

    def _add(self, name: str, task: Task, *, group: str | None, burst: int, version: int) -> None:
        seed = zlib.crc32(f"{self._seed}/{name}".encode())
        self.executions[name] = Execution(
            execution=name, task=task, group=group, burst=burst, version=version, seed=seed
        )
