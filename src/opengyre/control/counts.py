"""Dispatched, launched, finished: cumulative over the run, and the waterlevel between them.

Owns: the three counts. Must not know: which execution it was.
Invariant: 0 <= finished <= launched <= dispatched after every change.
"""

from dataclasses import dataclass

from opengyre.control.errors import InvariantError


@dataclass(slots=True, kw_only=True)
class Counts:
    dispatched: int = 0
    launched: int = 0
    finished: int = 0

    @property
    def waterlevel(self) -> int:
        return self.dispatched - self.finished

    @property
    def queued(self) -> int:
        return self.dispatched - self.launched

    @property
    def running(self) -> int:
        return self.launched - self.finished

    def add_dispatched(self, num: int) -> None:
        self.dispatched += num

    def add_launched(self) -> None:
        self.launched += 1
        self._check()

    def add_finished(self) -> None:
        self.finished += 1
        self._check()

    def _check(self) -> None:
        if not 0 <= self.finished <= self.launched <= self.dispatched:
            raise InvariantError(f"0 <= f <= p <= d broken: {self}")
