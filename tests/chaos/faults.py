"""The matrix of faults: who is struck, with what, at which moment; and samples of it by a seed.

Owns: its axes. Must not know: how a moment is seen or a fault is done.
"""

import random
import signal
from dataclasses import dataclass
from enum import Enum

MOST_FOR_ONE = 3
"""A cell is started again no more often than this in a run."""


class Moment(Enum):
    """Told by what the controller sends and hears, never by a clock."""

    JOIN = "while it joins a step"
    WORK = "with a micro-step in hand"
    PAUSE = "while its pipeline stands without data"
    SETTLE = "before the reduction"
    REDUCE = "in the reduction"
    UPDATE = "between reduction and commit"
    CHECKPOINT = "during a checkpoint"
    PUBLISH = "during a publication"
    LEAVE = "while it leaves rollout"
    RETURN = "while it returns to rollout"


class Blow(Enum):
    KILL = signal.SIGKILL
    STOP = signal.SIGSTOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Stage `stage` of cell `cell` is struck `depth_s` after `moment` began, unless it is over
    before."""

    cell: int
    stage: int
    blow: Blow
    moment: Moment
    depth_s: float = 0.0

    def __str__(self) -> str:
        return f"c{self.cell}.{self.stage} {self.blow.name} {self.moment.name}"


def matrix(num_stages: int, *, seed: int) -> list[Fault]:
    """All of it, in an order by the seed, as are the depths."""
    drawn = random.Random(f"{seed}-{num_stages}")
    all_of_it = [
        Fault(
            cell=cell,
            stage=stage,
            blow=blow,
            moment=moment,
            depth_s=drawn.choice((0.0, 0.002, 0.01, 0.05)),
        )
        for cell in (0, 1)
        for stage in range(num_stages)
        for blow in Blow
        for moment in Moment
    ]
    drawn.shuffle(all_of_it)
    return all_of_it


def sample(num_stages: int, *, seed: int) -> list[Fault]:
    """Each moment once."""
    by_moment = {one.moment: one for one in matrix(num_stages, seed=seed)}
    return list(by_moment.values())


def chains(faults: list[Fault], *, most_for_one: int = MOST_FOR_ONE) -> list[list[Fault]]:
    """Faults of one run after another: of each cell at most `most_for_one`. The first run has most
    of them."""
    runs: list[list[Fault]] = []
    for cell in (0, 1):
        own = [one for one in faults if one.cell == cell]
        for number, start in enumerate(range(0, len(own), most_for_one)):
            if number == len(runs):
                runs.append([])
            runs[number] += own[start : start + most_for_one]
    return runs
