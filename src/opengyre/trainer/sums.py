"""The bookkeeping of one step beside a cell's gradient sums, shared by every cell backend.

Owns: which step and version the sums belong to, what runs and what was added. Must not know
arithmetic. Invariants: sums hold micro-steps of one step and one version, each once; members of a
reduction have no micro-step in common.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep, StepCounts
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.wire import add_counts

NO_STEP = -1


class Odd(msgspec.Struct, frozen=True, kw_only=True):
    """The first gradient of a stage that was not finite, and the micro-step that brought it."""

    number: int
    weight: str


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The divided gradient of a stage: its sum of squares over what this stage answers for, and
    the first weight of which it is not finite ("" if none)."""

    sum_squares: float
    odd: str


class StepLedger:
    """What this cell's sums hold. `step` is NO_STEP when no step is open."""

    def __init__(self) -> None:
        self.open(NO_STEP, NO_STEP)

    def open(self, step: int, version: int) -> None:
        self.step = step
        self.version = version
        self.counts = StepCounts()
        self.reduced: StepCounts | None = None
        self._running: dict[int, MicroStep] = {}
        self._groups: dict[int, list[str]] = {}

    def forget(self) -> None:
        self.open(NO_STEP, NO_STEP)

    def start(self, made: MicroStep) -> None:
        """Refuse work of another step or version, and a second run of a number."""
        if (made.step, made.version) != (self.step, self.version):
            raise BoundaryError(
                "trainer",
                f"micro-step of step {made.step}, version {made.version}; "
                f"open is step {self.step}, version {self.version}",
                retryable=False,
            )
        if made.number in self._groups:
            raise InvariantError(f"micro-step {made.number} of step {made.step} ran twice")
        self._running[made.number] = made
        self._groups[made.number] = list(dict.fromkeys(path.group for path in made.paths))

    def finish(self, number: int) -> MicroStep:
        """What was started as `number`, once."""
        if number not in self._running:
            raise InvariantError(f"micro-step {number} of step {self.step} ended and never began")
        return self._running.pop(number)

    def add(self, counts: StepCounts) -> StepCounts:
        self.counts = add_counts(self.counts, counts)
        return counts

    def settled(self, odd: Sequence[Odd | None]) -> StepCounts:
        """The counts when nothing runs; `odd` is what each stage found not finite, in order."""
        if self._running:
            raise InvariantError(f"step {self.step} settles while {list(self._running)} run")
        named = [one for one in odd if one is not None]
        if named and not self.counts.odd:
            first = min(named, key=lambda one: one.number)
            groups = ", ".join(self._groups[first.number])
            words = (
                f"the gradient of {first.weight} is not finite in micro-step {first.number}, "
                f"group {groups}"
            )
            self.counts = msgspec.structs.replace(self.counts, odd=words)
        return self.counts

    def check_open(self, step: int) -> None:
        if step != self.step:
            raise BoundaryError(
                "trainer", f"step {step} asked, step {self.step} is open", retryable=False
            )

    def total_with(self, others: Sequence[StepCounts]) -> StepCounts:
        """Own counts and the others'. Raises InvariantError if a micro-step is in two."""
        total = self.counts
        for counts in others:
            total = add_counts(total, counts)
        twice = [number for number, times in Counter(total.micro_steps).items() if times > 1]
        if twice:
            raise InvariantError(f"micro-step {twice[0]} of step {self.step} is in two sums")
        return total

    def take_reduced(self) -> StepCounts:
        if self.reduced is None:
            raise InvariantError(f"step {self.step} is updated before it is reduced")
        return self.reduced
