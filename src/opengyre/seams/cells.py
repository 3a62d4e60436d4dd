"""The training side of a cell, and the micro-step on the wire.

Implementations of CellBackend: embedded torch (any number of pipeline stages), emulated (time
only, exact integer gradients). Backends are synchronous: the cell process runs them in its
compute thread. Invariants: weights are fixed while gradients accumulate; gradients are
unnormalised sums plus counts; `update` alone divides.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from opengyre.seams.memory import MemoryHeld
from opengyre.seams.weights import Snapshot

Range = tuple[int, int]
"""[start, end) of the flat tokens of a micro-step."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Flat tokens [start, end), each of which sees `ancestors` (flat ranges of earlier segments, in
    order) and its own segment so far. No ancestors: a path from its first token on."""

    start: int
    end: int
    ancestors: list[Range] = []


class TrainedPath(msgspec.Struct, frozen=True, kw_only=True):
    """One path. `pieces`, joined, are its whole line; `trained` are the flat tokens it trains, each
    of which is in one path only. No pieces: it is counted and nothing of it is computed.

    `turn` is its leaf's; `advantage` A_e; `num_path_tokens` T_j; `num_execution_tokens` T_e (over
    all paths of the execution), so T_j / T_e is this path's share of one execution.
    """

    execution: str
    group: str
    turn: str
    pieces: list[Range]
    trained: list[Range]
    advantage: float
    num_path_tokens: int
    num_execution_tokens: int


class MicroStep(msgspec.Struct, frozen=True, kw_only=True):
    """Packed rows: flat arrays of length T (tokens over all segments).

    `position_ids` are depths in a token's own line; `logprobs` the sampling logprobs (0 where
    nothing was sampled). Numbers within a step count from 0 and are never reused in it.
    `num_repeated_tokens`: what the same paths would take one by one.
    """

    step: int
    number: int
    version: int
    token_ids: list[int]
    position_ids: list[int]
    logprobs: list[float]
    segments: list[Segment]
    paths: list[TrainedPath]
    num_repeated_tokens: int = 0

    @property
    def num_trained_tokens(self) -> int:
        return sum(end - start for path in self.paths for start, end in path.trained)


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Additive next to the gradient: executions are sums of T_j / T_e fractions, the divergence
    from the reference is summed over tokens (0 without one). `odd`: what was not finite, in words
    that name the weight and the group; such sums must not be applied."""

    num_executions: float = 0.0
    num_tokens: int = 0
    loss_sum: float = 0.0
    num_clipped: int = 0
    divergence_sum: float = 0.0
    micro_steps: list[int] = []
    odd: str = ""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where one pipeline stage's time went: since its executor began, or in one step.

    `bubble_s`: waits with
    micro-steps in flight; `waiting_s`: waits for data, with none."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    bubble_s: float = 0.0
    waiting_s: float = 0.0


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the members of one reduction meet: `store` is "host:port" of the core's store, `name`
    is of one membership and one try, `rank` 0 is the core."""

    store: str
    name: str
    rank: int
    size: int


class UpdateNorms(msgspec.Struct, frozen=True, kw_only=True):
    """`is_applied` is False when the step had no trainable token or a number was not finite
    (`reason` says which); then the weights are unchanged."""

    grad_norm: float
    loss: float
    learning_rate: float
    is_applied: bool
    reason: str = ""


class CellBackend(Protocol):
    def enter_training(self) -> None: ...

    def leave_training(self) -> None: ...

    def held(self) -> MemoryHeld:
        """What all stages hold now; nothing is in flight. KV memory is the engine's to tell."""
        ...

    def open_step(self, step: int, version: int, snapshot: Snapshot | None) -> int:
        """Zero the sums; a satellite pulls and verifies `snapshot` (None on the core).
        Returns the verified version."""
        ...

    def run(self, micro_step: MicroStep) -> StepCounts:
        """Start it; one stage also ends it. Returns what ended meanwhile: gradients of these
        `micro_steps` are in this cell's sums."""
        ...

    def finish_one(self) -> StepCounts:
        """End the oldest that is in flight. Returns what ended: nothing when nothing was."""
        ...

    def drop_sums(self) -> None:
        """Forget this step's sums (the step is abandoned)."""
        ...

    def settle(self, step: int) -> tuple[StepCounts, list[StageTimes]]:
        """Nothing is in flight and all stages are at one boundary. What this cell's sums hold, and
        where each stage's time went since the step was opened."""
        ...

    def reduce_together(
        self, step: int, rendezvous: Rendezvous, others: list[StepCounts]
    ) -> StepCounts:
        """Every member calls it at the same time; `others` are the counts of all other members.
        Copies of the sums are added up at the core. Returns what all sums hold. Own sums stay until
        `update`. Raises BoundaryError (retryable) when a member is gone or does not answer."""
        ...

    def expose_gradients(self, step: int) -> tuple[Snapshot, StepCounts]:
        """A stable copy of this cell's sums, for the core to pull."""
        ...

    def reduce(self, members: list[tuple[Snapshot, StepCounts]]) -> StepCounts:
        """Core only: copy of own sums + every member's, in the given order. Own sums stay until
        `update`, so a failed reduce can be repeated with other members."""
        ...

    def update(self, version: int) -> UpdateNorms:
        """Core only: divide by the reduced counts, check finite, clip, one optimizer update;
        the weights then are `version`."""
        ...

    def expose_weights(self, version: int, *, pinned: Sequence[int] = ()) -> Snapshot:
        """A stable copy of the weights; what was exposed as one of the `pinned` versions stays."""
        ...

    def load(self, snapshot: Snapshot) -> int:
        """Overwrite the weights in place from `snapshot`; returns the verified version."""
        ...

    def save(self, folder: str) -> None:
        """Core only: weights and optimizer state as safetensors into an existing folder."""
        ...

    def restore(self, folder: str) -> None:
        """Core only: the inverse of save."""
        ...

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        """Read-only copies of all weights by name (tests, checksums)."""
        ...
