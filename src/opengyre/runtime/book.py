"""What the controller knows of each execution beyond its counts: task, group, turns, verdict.

Owns: the way from dispatched groups to training rows' inputs. Invariants: an execution belongs
to at most one group; turns are kept in the order in which they were recorded.
"""

import zlib
from dataclasses import dataclass, field

from opengyre.seams.records import TurnRecord
from opengyre.seams.tasks import Task, TaskSource


class HeldTime:
    """How long we held an execution's requests; overlapping holds count once (DESIGN 2.5.6)."""

    def __init__(self) -> None:
        self._num_open = 0
        self._since_s = 0.0
        self._total_s = 0.0

    def set(self, is_held: bool, now_s: float) -> None:
        if is_held:
            if self._num_open == 0:
                self._since_s = now_s
            self._num_open += 1
        elif self._num_open > 0:
            self._num_open -= 1
            if self._num_open == 0:
                self._total_s += now_s - self._since_s

    def total_s(self, now_s: float) -> float:
        return self._total_s + (now_s - self._since_s if self._num_open else 0.0)


@dataclass(slots=True)
class Execution:
    """`group` is None for an eval execution. `turns` are those of the present launch."""

    execution: str
    task: Task
    group: str | None
    burst: int
    version: int
    seed: int
    turns: list[TurnRecord] = field(default_factory=list)
    held: HeldTime = field(default_factory=HeldTime)
    reward: float | None = None
    has_verdict: bool = False
    num_launches: int = 0


class Book:
    """All executions of a run by id, and the members of each group in dispatch order."""

    def __init__(self, *, train: TaskSource, evaluation: TaskSource | None, seed: int) -> None:
        self._train = train
        self._evaluation = evaluation
        self._seed = seed
        self.executions: dict[str, Execution] = {}
        self.members: dict[str, tuple[str, ...]] = {}
        self.evals: dict[int, list[Execution]] = {}

    def add_group(self, group: str, members: tuple[str, ...], *, burst: int, version: int) -> Task:
        """Register a dispatched group; the group's number chooses its task."""
        task = self._train.task_for_group(int(group[1:]))
        self.members[group] = members
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

    def tell_turn(self, turn: TurnRecord) -> None:
        self.executions[turn.execution].turns.append(turn)

    def rewards_of(self, group: str) -> list[tuple[str, float | None]]:
        return [(name, self.executions[name].reward) for name in self.members[group]]

    def mean_reward(self, groups: tuple[str, ...]) -> float | None:
        """Mean over the verdicts of these groups; None if there is none."""
        found = [reward for group in groups for _, reward in self.rewards_of(group)]
        valid = [reward for reward in found if reward is not None]
        return sum(valid) / len(valid) if valid else None

    def forget_group(self, group: str) -> None:
        """A consumed or void group needs no turns any more; memory stays bounded."""
        for name in self.members[group]:
            self.executions[name].turns.clear()

    def _add(self, name: str, task: Task, *, group: str | None, burst: int, version: int) -> None:
        seed = zlib.crc32(f"{self._seed}/{name}".encode())
        self.executions[name] = Execution(
            execution=name, task=task, group=group, burst=burst, version=version, seed=seed
        )
