"""Runs of many seeds, one after the other: to find what is broken, or that a canary is found."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.sim.seeded_loop import Mode
from tests.sim.seeded_world import Broken, SeededWorld, stormy


@dataclass(slots=True, kw_only=True)
class Found:
    """What a hunt met. `broken`: (seed, mode, what was wrong)."""

    num_runs: int = 0
    num_faults: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, Mode, str]] = field(default_factory=list)

    def __add__(self, other: "Found") -> "Found":
        return Found(
            num_runs=self.num_runs + other.num_runs,
            num_faults=self.num_faults + other.num_faults,
            broken=self.broken + other.broken,
        )

    def lines(self) -> str:
        return "\n".join(f"{seed} {mode}: {words}" for seed, mode, words in self.broken)


def hunt(seeds: Iterable[tuple[int, Mode]], *, num_most_broken: int = 5) -> Found:
    """Run each; stops after `num_most_broken` that broke a promise."""
    found = Found()
    for seed, mode in seeds:
        world = SeededWorld(seed=seed, mode=mode, weather=stormy(seed))
        found.num_runs += 1
        try:
            world.run()
        except Broken as error:
            found.broken.append((seed, mode, str(error)))
        found.num_faults.update(str(fault.harm) for fault in world.fate.done)
        if len(found.broken) >= num_most_broken:
            break
    return found
