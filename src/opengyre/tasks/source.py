"""Which task a group gets: weighted sets of tasks, drawn by a seed.

Owns the draw. Must not know groups' fates or versions. Invariants: the task of a group depends
on (sets, seed, index) alone, so every process and every resume sees the same; each set is gone
through completely before one of its tasks comes again.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from opengyre.seams.errors import ConfigError
from opengyre.seams.tasks import GraderKind, Task
from opengyre.tasks.harbor import load_tasks

MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """Tasks of one path, its share of the draw (any positive unit), the seed of its order."""

    tasks: tuple[Task, ...]
    weight: float = 1.0
    seed: int = 0


class SampledTasks:
    """Several sets by weight (seams.tasks.TaskSource).

    Which set is drawn follows the weights exactly (largest deficit first, ties by order), so one
    set of n tasks is visited in rounds of n. The order within a round is drawn from
    (seed, set, round).
    """

    def __init__(self, sets: Sequence[TaskSet], *, seed: int) -> None:
        if not sets or not all(one.tasks for one in sets):
            raise ConfigError("tasks: expected at least one task in every set")
        if not all(0 < one.weight < float("inf") for one in sets):
            raise ConfigError("tasks.weight: expected a positive number")
        self._sets = tuple(sets)
        self._seed = seed
        self._draws: list[tuple[int, int]] = []
        self._num_drawn = [0] * len(sets)
        self._order = lru_cache(maxsize=64)(self._shuffled)

    @property
    def num_tasks(self) -> int:
        return sum(len(one.tasks) for one in self._sets)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in the order of the sets."""
        return tuple(task for one in self._sets for task in one.tasks)

    def task_for_group(self, group_index: int) -> Task:
        if group_index < 0:
            raise IndexError(group_index)
        while len(self._draws) <= group_index:
            self._draw_next()
        which, position = self._draws[group_index]
        tasks = self._sets[which].tasks
        number, place = divmod(position, len(tasks))
        return tasks[self._order(which, number)[place]]

    def _draw_next(self) -> None:
        total = sum(one.weight for one in self._sets)
        due = len(self._draws) + 1
        deficits = [
            one.weight / total * due - drawn
            for one, drawn in zip(self._sets, self._num_drawn, strict=True)
        ]
        which = max(range(len(deficits)), key=lambda index: (deficits[index], -index))
        self._draws.append((which, self._num_drawn[which]))
        self._num_drawn[which] += 1

    def _shuffled(self, which: int, number: int) -> list[int]:
        order = list(range(len(self._sets[which].tasks)))
        random.Random(f"{self._seed}/{self._sets[which].seed}/{which}/{number}").shuffle(order)
        return order


def open_source(
    paths: Sequence[tuple[Path, float, int]], *, seed: int, kind: GraderKind
) -> SampledTasks:
    """The tasks of several (path, weight, seed), for this kind of grader. Raises ConfigError."""
    sets = [
        TaskSet(tasks=load_tasks(path, kind=kind), weight=weight, seed=set_seed)
        for path, weight, set_seed in paths
    ]
    return SampledTasks(sets, seed=seed)


def refuse_overlap(training: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raises ConfigError if a held-out task is also trained on, under whatever name."""
    trained = {task.content_hash: task for task in training}
    twins = [
        (task, trained[task.content_hash]) for task in held_out if task.content_hash in trained
    ]
    if twins:
        named = "; ".join(f"{held.folder} is {known.folder}" for held, known in twins[:MAX_NAMED])
        what = f"{len(twins)} held-out tasks are also in the training set ({named})"
        raise ConfigError(f"eval: {what}; remove them from one of the two")
