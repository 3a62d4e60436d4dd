"""The bookkeeping of one step beside a cell's gradient sums, shared by every cell backend.

Owns: which step and version the sums belong to, and what was added. Must not know arithmetic.
Invariants: sums hold micro-steps of one step and one version, each once; members of a reduction
have no micro-step in common.
"""

from collections import Counter
from collections.abc import Sequence

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep, StepCounts
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Snapshot
from opengyre.trainer.wire import add_counts

NO_STEP = -1


class StepLedger:
    """What this cell's sums hold. `step` is NO_STEP when no step is open."""

    def __init__(self) -> None:
        self.step = NO_STEP
        self.version = NO_STEP
        self.counts = StepCounts()
        self.reduced: StepCounts | None = None

    def open(self, step: int, version: int) -> None:
        self.step = step
        self.version = version
        self.counts = StepCounts()
        self.reduced = None

    def forget(self) -> None:
        self.open(NO_STEP, NO_STEP)

    def check_micro_step(self, made: MicroStep) -> None:
        """Refuse work of another step or version, and a second run of a number."""
        if (made.step, made.version) != (self.step, self.version):
            raise BoundaryError(
                "trainer",
                f"micro-step of step {made.step}, version {made.version}; "
                f"open is step {self.step}, version {self.version}",
                retryable=False,
            )
        if made.number in self.counts.micro_steps:
            raise InvariantError(f"micro-step {made.number} of step {made.step} ran twice")

    def add(self, counts: StepCounts) -> StepCounts:
        self.counts = add_counts(self.counts, counts)
        return counts

    def check_open(self, step: int) -> None:
        if step != self.step:
            raise BoundaryError(
                "trainer", f"step {step} asked, step {self.step} is open", retryable=False
            )

    def total_with(self, members: Sequence[tuple[Snapshot, StepCounts]]) -> StepCounts:
        """Own counts and the members'. Raises InvariantError if a micro-step is in two."""
        total = self.counts
        for snapshot, counts in members:
            self.check_open(snapshot.version)
            total = add_counts(total, counts)
        twice = [number for number, times in Counter(total.micro_steps).items() if times > 1]
        if twice:
            raise InvariantError(f"micro-step {twice[0]} of step {self.step} is in two sums")
        return total

    def take_reduced(self) -> StepCounts:
        if self.reduced is None:
            raise InvariantError(f"step {self.step} is updated before it is reduced")
        return self.reduced
