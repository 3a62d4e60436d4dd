"""What the lead of a cell orders from each stage, and what a stage answers. A closed set, typed.

Tensors never travel in an order: they are exposed on a weight plane, or go through the pipeline.
Invariant: each order has one answer; `Refused` where it raised a BoundaryError.
"""

import msgspec

from opengyre.seams.cells import Rendezvous, StageTimes
from opengyre.seams.memory import MemoryHeld
from opengyre.seams.weights import Descriptor, Snapshot
from opengyre.trainer.sums import Odd, Prepared


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all orders and answers; the tag is the class name."""


class Did(Order, frozen=True, kw_only=True):
    """It was done; there is nothing more to say."""


class Refused(Order, frozen=True, kw_only=True):
    """A BoundaryError, to be raised at the lead."""

    boundary: str
    reason: str
    retryable: bool


class Enter(Order, frozen=True, kw_only=True):
    """Take memory for training."""


class Leave(Order, frozen=True, kw_only=True):
    """Give memory of training back, that of the weights too unless `keeps_weights`."""

    keeps_weights: bool


class Open(Order, frozen=True, kw_only=True):
    """Zero the sums. Refused outside training."""


class Serve(Order, frozen=True, kw_only=True):
    """Run what comes through the pipeline, until it is drained. Answered by Served."""


class Served(Order, frozen=True, kw_only=True):
    times: StageTimes


class Drop(Order, frozen=True, kw_only=True):
    """Forget the sums."""


class FindOdd(Order, frozen=True, kw_only=True):
    """What of this step's gradients was not finite. Answered by Found."""


class Found(Order, frozen=True, kw_only=True):
    odd: Odd | None


class TellMemory(Order, frozen=True, kw_only=True):
    """What this stage's process holds. Answered by Holding."""


class Holding(Order, frozen=True, kw_only=True):
    memory: MemoryHeld


class ShareSums(Order, frozen=True, kw_only=True):
    """Expose the sums. Answered by Shared."""

    step: int


class Shared(Order, frozen=True, kw_only=True):
    part: Descriptor


class AddSums(Order, frozen=True, kw_only=True):
    """Add the members' sums of this stage to a copy of the own, in order."""

    members: list[Snapshot]


class AddTogether(Order, frozen=True, kw_only=True):
    """Add up copies of the sums at the core, all members at once."""

    rendezvous: Rendezvous


class ShareTied(Order, frozen=True, kw_only=True):
    """Expose the reduced gradient of the tied weight. Answered by Shared."""

    step: int


class AddTied(Order, frozen=True, kw_only=True):
    """Add the other end's gradient of the tied weight."""

    part: Descriptor


class Prepare(Order, frozen=True, kw_only=True):
    """Divide the reduced gradient. Answered by Ready."""

    divisor: float


class Ready(Order, frozen=True, kw_only=True):
    prepared: Prepared


class Apply(Order, frozen=True, kw_only=True):
    """One optimizer update with the prepared gradient times `scale`."""

    scale: float


class ShareWeights(Order, frozen=True, kw_only=True):
    """Expose the weights as `version`; the `pinned` versions stay. Answered by Shared."""

    version: int
    pinned: list[int] = []


class ReadWeights(Order, frozen=True, kw_only=True):
    """Expose the weights beside the gradients, for a look at them. Answered by Shared."""


class Pull(Order, frozen=True, kw_only=True):
    """Copy the own weights out of `snapshot` and verify them, beside those that are in use."""

    snapshot: Snapshot


class Write(Order, frozen=True, kw_only=True):
    """Overwrite weights (and moments) with what was pulled or read, or forget it."""

    is_accepted: bool


class Save(Order, frozen=True, kw_only=True):
    """Write the own part of a checkpoint."""

    folder: str


class Restore(Order, frozen=True, kw_only=True):
    """Read the own part of a checkpoint, whatever number of stages wrote it, beside what is in use:
    it is written by Write."""

    folder: str
    num_updates: int


ALL: tuple[type[Order], ...] = tuple(Order.__subclasses__())
