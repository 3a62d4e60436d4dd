"""Which groups each step consumed, and when.

Owns: committed steps, groups' versions. Must not know: who worked on them.
Invariant: a step that is redone after a core's death counts as it was committed last.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from opengyre.control.ids import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    at_s: float
    version: int
    groups: tuple[GroupId, ...]


class StepBook:
    def __init__(self) -> None:
        self._version_by_group: dict[GroupId, int] = {}
        self._by_step: dict[int, Committed] = {}

    @property
    def num_groups(self) -> int:
        """Groups dispatched so far."""
        return len(self._version_by_group)

    def dispatch(self, groups: Iterable[GroupId], version: int) -> None:
        self._version_by_group.update((group, version) for group in groups)

    def commit(self, step: int, committed: Committed) -> None:
        self._by_step[step] = committed

    def times(self) -> tuple[float, ...]:
        """When each step was committed, in seconds, in the order of the steps."""
        return tuple(self._by_step[step].at_s for step in sorted(self._by_step))

    def staleness(self) -> dict[int, int]:
        """Consumed groups by staleness, in ascending order."""
        counts: dict[int, int] = {}
        for committed in self._by_step.values():
            for group in committed.groups:
                age = committed.version - self._version_by_group[group]
                counts[age] = counts.get(age, 0) + 1
        return dict(sorted(counts.items()))
