"""One stage's side of a cell: carries out what the lead orders, on the stage of this process.

Owns: which calls on the stage, the planes and the groups an order is. Must not know: other stages,
steps' bookkeeping, processes. Invariant: an order that fails leaves weights and sums as they were.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import Rendezvous
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Descriptor, Snapshot, WeightPlane
from opengyre.trainer import orders as o
from opengyre.trainer.checkpoint import read_named, write_part
from opengyre.trainer.prefix_groups import PrefixGroups
from opengyre.trainer.stage import Stage, StageSettings
from opengyre.trainer.stage_model import StageModel
from opengyre.transport.snapshots import pull_named

TIED = "tied"


def sums_name(stage: int) -> str:
    """What the flat sums of a stage are called on the plane."""
    return f"sums.{stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Stage `stage` of `num_stages`; `tied` is the weight that the first and the last one have,
    "" if none."""

    stage: int = 0
    num_stages: int = 1
    tied: str = ""

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def shared(self) -> tuple[str, ...]:
        """What the first stage has too and answers for."""
        return (self.tied,) if self.tied and self.is_last and self.stage else ()


class StageDesk:
    """The two planes carry weights and gradients; this object owns neither."""

    def __init__(
        self,
        model: StageModel,
        *,
        settings: StageSettings,
        place: Place,
        weights: WeightPlane,
        gradients: WeightPlane,
    ) -> None:
        self.place = place
        self.stage = Stage(model, settings=settings, is_last=place.is_last, shared=place.shared)
        self.weights = weights
        self.gradients = gradients
        self.groups = PrefixGroups()
        self._staged: _Staged | None = None

    def handle(self, order: o.Order) -> o.Order:
        """Raises BoundaryError."""
        match order:
            case o.Enter():
                self.stage.enter()
            case o.Leave():
                self.stage.leave(keeps_weights=order.keeps_weights)
            case o.Open():
                if not self.stage.is_in_training:
                    what = "the cell is not in training"
                    raise BoundaryError("trainer", what, retryable=False)
                self.stage.drop_sums()
            case o.Drop():
                self.stage.drop_sums()
            case o.Pull() | o.Restore() | o.Write():
                self._load(order)
            case o.Save():
                self._save(Path(order.folder))
            case _:
                return self._tell(order)
        return o.Did()

    def _tell(self, order: o.Order) -> o.Order:
        """What is asked for, not done."""
        match order:
            case o.FindOdd():
                return o.Found(odd=self.stage.odd)
            case o.TellMemory():
                exposed_bytes = self.weights.exposed_bytes + self.gradients.exposed_bytes
                held = replace(self.stage.held(), exposed_bytes=exposed_bytes)
                return o.Holding(memory=held)
            case o.ShareWeights():
                arrays = self.stage.arrays()
                part = self.weights.expose(arrays, order.version, pinned=order.pinned)
                return o.Shared(part=part)
            case o.ReadWeights():
                return o.Shared(part=self.gradients.expose(self.stage.arrays(), 0))
            case _:
                return self._reduce(order)

    def _reduce(self, order: o.Order) -> o.Order:
        """From the sums of a step to the update."""
        stage = self.stage
        match order:
            case o.ShareSums():
                flat = {sums_name(self.place.stage): _host(stage.sums.flat)}
                return o.Shared(part=self.gradients.expose(flat, order.step))
            case o.AddSums():
                stage.add_to_copy(self._pull_sums(one) for one in order.members)
            case o.AddTogether():
                self._add_together(order.rendezvous)
            case o.ShareTied():
                tied = {TIED: _host(stage.shared_gradient(self.place.tied))}
                return o.Shared(part=self.gradients.expose(tied, order.step))
            case o.AddTied():
                self._add_tied(order.part)
            case o.Prepare():
                return o.Ready(prepared=stage.prepare(order.divisor))
            case o.Apply():
                stage.apply(order.scale)
            case _:
                raise InvariantError(f"no stage carries out {type(order).__name__}")
        return o.Did()

    def _add_together(self, rendezvous: Rendezvous) -> None:
        """The core's copy becomes the sum; a satellite's is of no more use."""
        copy = self.groups.reduce_copy(
            self.stage.sums.flat, rendezvous=rendezvous, stage=self.place.stage
        )
        if rendezvous.rank == 0:
            self.stage.reduced = copy

    def _pull_sums(self, snapshot: Snapshot) -> np.ndarray[Any, Any]:
        pulled = np.empty_like(_host(self.stage.sums.flat))
        pull_named(self.gradients, snapshot, {sums_name(self.place.stage): pulled})
        return pulled

    def _add_tied(self, part: Descriptor) -> None:
        own = self.stage.shared_gradient(self.place.tied)
        pulled = np.empty(own.shape, dtype=_host(own).dtype)
        self.gradients.pull(part, {TIED: pulled})
        own += torch.from_numpy(pulled).to(own.device)

    def _load(self, order: o.Pull | o.Restore | o.Write) -> None:
        """In two halves, so that all stages of a cell load or none does."""
        match order:
            case o.Pull():
                weights = self.stage.staged()
                into = {name: one.numpy() for name, one in weights.items()}
                pull_named(self.weights, order.snapshot, into)
                self._staged = _Staged(weights=weights)
            case o.Restore():
                self._staged = self._read(Path(order.folder), order.num_updates)
            case o.Write():
                staged, self._staged = self._staged, None
                if staged is not None and order.is_accepted:
                    self._write(staged)

    def _write(self, staged: "_Staged") -> None:
        self.stage.model.acquire()
        self.stage.write(staged.weights)
        if staged.moments is not None:
            optimizer = self.stage.optimizer
            optimizer.load_state(staged.moments, num_updates=staged.num_updates)

    def _read(self, folder: Path, num_updates: int) -> "_Staged":
        parameters = self.stage.model.parameters
        weights = read_named(folder, "model", parameters)
        _check_shapes(weights, dict(parameters))
        names = self.stage.optimizer.state_names() if num_updates else []
        moments = read_named(folder, "optimizer", names)
        return _Staged(weights=weights, moments=moments, num_updates=num_updates)

    def _save(self, folder: Path) -> None:
        """Weights and moments; what two stages share is written by the first."""
        shared = self.stage.shared
        weights = {n: p.detach() for n, p in self.stage.model.parameters.items() if n not in shared}
        state = self.stage.optimizer.state()
        moments = {k: v for k, v in state.items() if k.split("/", 1)[1] not in shared}
        where = {"stage": self.place.stage, "num_stages": self.place.num_stages}
        write_part(folder, "model", weights, **where)
        write_part(folder, "optimizer", moments, **where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """What was read and verified, to be written; `moments` of a checkpoint only."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor] | None = None
    num_updates: int = 0


def _host(tensor: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().numpy()
    return array


def _check_shapes(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    for name, tensor in theirs.items():
        if (tensor.shape, tensor.dtype) != (ours[name].shape, ours[name].dtype):
            raise BoundaryError("checkpoint", f"weight {name} does not fit", retryable=False)
