"""A cell backend whose micro-steps take time and whose gradients are exact integer sums.

Owns: an int64 weight vector. Must not know torch. Invariants: a token adds the same integers
wherever it is packed, so weights are equal bit for bit over any split of the work; arithmetic
wraps modulo 2^64.
"""

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from opengyre.seams.cells import (
    MicroStep,
    Rendezvous,
    StageTimes,
    StepCounts,
    TrainedPath,
    UpdateNorms,
)
from opengyre.seams.errors import BoundaryError
from opengyre.seams.memory import MemoryHeld
from opengyre.seams.weights import Snapshot, WeightPlane
from opengyre.trainer.resident import resident_bytes
from opengyre.trainer.sums import StepLedger
from opengyre.trainer.wire import execution_share
from opengyre.transport.snapshots import pull_named

NAME = "weights"
_Vector = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSettings:
    """`tokens_per_s` sets how long a micro-step takes; 0 takes no time."""

    tokens_per_s: float = 0.0
    num_weights: int = 64
    learning_rate: float = 1.0


class EmulatedCell:
    """The two planes carry weights and gradient sums; this object owns neither."""

    def __init__(
        self, *, weights: WeightPlane, gradients: WeightPlane, settings: EmulatedSettings
    ) -> None:
        self._weights_plane = weights
        self._gradients_plane = gradients
        self._settings = settings
        self._weights: _Vector = np.arange(settings.num_weights, dtype=np.int64)
        self._sums: _Vector = np.zeros_like(self._weights)
        self._reduced: _Vector = np.zeros_like(self._weights)
        self._ledger = StepLedger()
        self._num_updates = 0

    def enter_training(self) -> None:
        self._ledger.forget()

    def leave_training(self) -> None:
        self.drop_sums()

    def held(self) -> MemoryHeld:
        planes = (self._weights_plane, self._gradients_plane)
        return MemoryHeld(
            weights_bytes=self._weights.nbytes,
            gradients_bytes=self._sums.nbytes + self._reduced.nbytes,
            exposed_bytes=sum(one.exposed_bytes for one in planes),
            resident_bytes=resident_bytes(),
        )

    def open_step(self, step: int, version: int, snapshot: Snapshot | None) -> int:
        verified = version if snapshot is None else self.load(snapshot)
        self._sums[:] = 0
        self._ledger.open(step, verified)
        return verified

    def run(self, micro_step: MicroStep) -> StepCounts:
        self._ledger.start(micro_step)
        if self._settings.tokens_per_s > 0:
            time.sleep(len(micro_step.token_ids) / self._settings.tokens_per_s)
        for path in micro_step.paths:
            _add_path(self._sums, micro_step, path)
        self._ledger.finish(micro_step.number)
        return self._ledger.add(
            StepCounts(
                num_executions=execution_share(micro_step),
                num_tokens=micro_step.num_trained_tokens,
                micro_steps=[micro_step.number],
            )
        )

    def finish_one(self) -> StepCounts:
        return StepCounts()

    def settle(self, step: int) -> tuple[StepCounts, list[StageTimes]]:
        self._ledger.check_open(step)
        return self._ledger.settled([]), [StageTimes()]

    def reduce_together(
        self, step: int, rendezvous: Rendezvous, others: Sequence[StepCounts]
    ) -> StepCounts:
        """These cells are in no group: their sums travel as a star."""
        what = f"an emulated cell is not in {rendezvous.name}"
        raise BoundaryError("reduce", what, retryable=False)

    def drop_sums(self) -> None:
        self._sums[:] = 0
        self._ledger.forget()

    def expose_gradients(self, step: int) -> tuple[Snapshot, StepCounts]:
        self._ledger.check_open(step)
        part = self._gradients_plane.expose({NAME: self._sums}, step)
        return Snapshot(version=step, parts=[part]), self._ledger.counts

    def reduce(self, members: Sequence[tuple[Snapshot, StepCounts]]) -> StepCounts:
        for snapshot, _ in members:
            self._ledger.check_open(snapshot.version)
        total = self._ledger.total_with([counts for _, counts in members])
        self._reduced[:] = self._sums
        pulled = np.zeros_like(self._sums)
        for snapshot, _ in members:
            pull_named(self._gradients_plane, snapshot, {NAME: pulled})
            self._reduced += pulled
        self._ledger.reduced = total
        return total

    def update(self, version: int) -> UpdateNorms:
        counts = self._ledger.take_reduced()
        is_applied = counts.num_tokens > 0
        norm = float(np.linalg.norm(self._reduced.astype(np.float64)))
        if is_applied:
            self._weights += self._reduced
            self._num_updates += 1
        self.drop_sums()
        return UpdateNorms(
            grad_norm=norm,
            loss=0.0,
            learning_rate=self._settings.learning_rate,
            is_applied=is_applied,
            reason="" if is_applied else f"no trainable token for version {version}",
        )

    def expose_weights(self, version: int, *, pinned: Sequence[int] = ()) -> Snapshot:
        part = self._weights_plane.expose({NAME: self._weights}, version, pinned=pinned)
        return Snapshot(version=version, parts=[part])

    def load(self, snapshot: Snapshot) -> int:
        staged = np.zeros_like(self._weights)
        verified = pull_named(self._weights_plane, snapshot, {NAME: staged})
        self._weights[:] = staged
        return verified

    def save(self, folder: str) -> None:
        save_file({NAME: self._weights}, Path(folder) / "model.safetensors")
        state = json.dumps({"schema": 1, "num_updates": self._num_updates})
        (Path(folder) / "trainer.json").write_text(state)

    def restore(self, folder: str) -> None:
        self._weights[:] = load_file(Path(folder) / "model.safetensors")[NAME]
        state = json.loads((Path(folder) / "trainer.json").read_text())
        self._num_updates = int(state["num_updates"])

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        return {NAME: self._weights.copy()}


def _add_path(sums: _Vector, made: MicroStep, path: TrainedPath) -> None:
    """Each trained token adds an integer of (execution, position, id, advantage) to one weight."""
    salt = zlib.crc32(f"{path.execution}:{path.advantage!r}".encode())
    for start, end in path.trained:
        ids = np.array(made.token_ids[start:end], dtype=np.int64)
        positions = np.array(made.position_ids[start:end], dtype=np.int64)
        mixed = (ids * 1_000_003 + positions * 8_191 + salt) % 2_147_483_647
        np.add.at(sums, mixed % len(sums), mixed // len(sums) - 2**24)
