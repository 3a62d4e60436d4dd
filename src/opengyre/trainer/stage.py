"""One pipeline stage's share of a cell's training side: weights, gradient sums, optimizer.

Owns: the buffers of the part of the model that runs in this process. Must not know: other stages,
streams, how tensors travel, who is core. Invariants: weights are written in place only; sums are
unnormalised until `prepare`; a number that is not finite never reaches the weights (P20).
"""

import ctypes
import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.memory import MemoryHeld
from opengyre.trainer.flat import FlatSums
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.objectives.kl import k3
from opengyre.trainer.objectives.signature import Trained
from opengyre.trainer.optimizer import AdamWSettings, CoreOptimizer
from opengyre.trainer.pipeline.parts import Passed, Told
from opengyre.trainer.reference import Reference
from opengyre.trainer.resident import Growth
from opengyre.trainer.stage_memory import bytes_of, meter_of
from opengyre.trainer.stage_model import StageModel
from opengyre.trainer.sums import Odd, Prepared

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """`temperature` is the sampler's: recorded logprobs are of the scaled distribution."""

    loss: StreamedLoss
    optimizer: AdamWSettings
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    number: int
    received: Tensor | None
    made: Tensor


class Stage:
    """`model` is the part; its weights now are the run's initial ones: with a divergence in the
    loss they are copied here. `shared` are weights that the first stage holds too: they are trained
    here alike and count in the first stage's norm only."""

    def __init__(
        self,
        model: StageModel,
        *,
        settings: StageSettings,
        is_last: bool,
        shared: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.is_last = is_last
        self.shared = tuple(shared)
        self.odd: Odd | None = None
        self._settings = settings
        self._sums: FlatSums | None = None
        self._reduced: Tensor | None = None
        self._optimizer: CoreOptimizer | None = None
        self._reference: Reference | None = None
        self._meter = meter_of(next(iter(model.parameters.values())).device)
        self._activations = Growth(self._meter)
        if settings.loss.kl_coefficient:
            self._reference = Reference(model)
            num_mib = self._reference.num_bytes / 2**20
            log.info("training.kl_coefficient keeps %.1f MiB of initial weights", num_mib)
        _check_trainable(model.parameters, settings.temperature)

    @property
    def is_in_training(self) -> bool:
        return self._sums is not None

    @property
    def sums(self) -> FlatSums:
        """Raises BoundaryError outside training."""
        if self._sums is None:
            raise BoundaryError("trainer", "the cell is not in training", retryable=False)
        return self._sums

    @property
    def sums_dtype(self) -> np.dtype[Any]:
        """Of sums and weights alike."""
        first = next(iter(self.model.parameters.values()))
        return np.dtype(np.float64 if first.dtype == torch.float64 else np.float32)

    @property
    def reduced(self) -> Tensor:
        """The sums over all members, flat; in place until `apply`."""
        if self._reduced is None:
            raise InvariantError("an update before the reduce")
        return self._reduced

    @reduced.setter
    def reduced(self, flat: Tensor) -> None:
        self._reduced = flat

    @property
    def optimizer(self) -> CoreOptimizer:
        """Made at the first use: satellites never hold its state."""
        if self._optimizer is None:
            self._optimizer = CoreOptimizer(self.model.parameters, self._settings.optimizer)
        return self._optimizer

    def held(self) -> MemoryHeld:
        """What this process holds now, beside what it exposes and the KV memory."""
        reference = 0 if self._reference is None else self._reference.num_bytes
        flat = [] if self._sums is None else [self._sums.flat]
        flat += [] if self._reduced is None else [self._reduced]
        moments = {} if self._optimizer is None else self._optimizer.state()
        return MemoryHeld(
            weights_bytes=self.model.weights_bytes + reference,
            gradients_bytes=bytes_of(flat),
            optimizer_bytes=bytes_of(moments.values()),
            activations_bytes=self._activations.take(),
            resident_bytes=self._meter.held_bytes(),
        )

    def enter(self) -> None:
        """Take the weights for training, and memory for sums. Idempotent."""
        if self._sums is not None:
            return
        self.model.acquire()
        self.model.enter()
        self._sums = FlatSums(self.model.parameters)
        if self._reference is not None:
            self._reference.place()

    def leave(self, *, keeps_weights: bool) -> None:
        """The model is the engine's again; memory of gradients is free on return, and that of
        weights nobody needs. Idempotent."""
        if self._sums is not None:
            self._sums = self._reduced = self.odd = None
            if self._reference is not None:
                self._reference.remove()
            self.model.leave()
        if not keeps_weights:
            self.model.release()
        free_memory()

    def drop_sums(self) -> None:
        if self._sums is not None:
            self._sums.flat.zero_()
        self._reduced = self.odd = None

    def forward(self, micro_step: MicroStep, received: Tensor | None) -> Passed:
        self._activations.begin()
        own = None if received is None else received[0].requires_grad_()
        targets = trained_positions(micro_step).to(self.sums.flat.device)
        reference = None
        if self._reference is not None:
            line = None if received is None else received[-1].detach()
            reference = self._reference.run(micro_step, line, targets)
        made = self.model.run(micro_step, own, targets)
        if self.is_last:
            return self._loss(micro_step, own, made, reference)
        lines = [made.detach()] if reference is None else [made.detach(), reference]
        graph = _Graph(number=micro_step.number, received=own, made=made)
        return Passed(sent=torch.stack(lines), graph=graph)

    def _loss(
        self, micro_step: MicroStep, received: Tensor | None, logp: Tensor, reference: Tensor | None
    ) -> Passed:
        trained = _trained_tokens(micro_step, self.sums.flat.dtype, logp.device)
        loss, num_clipped = self._settings.loss.summed(logp, trained, reference)
        divergence = 0.0 if reference is None else float(k3(logp.detach(), reference).sum())
        told = Told(
            loss_sum=float(loss.detach()), num_clipped=num_clipped, divergence_sum=divergence
        )
        graph = _Graph(number=micro_step.number, received=received, made=loss)
        return Passed(sent=None, told=told, graph=graph)

    def backward(self, passed: Passed, gradient: Tensor | None) -> Tensor | None:
        graph: _Graph = passed.graph
        torch.autograd.backward(graph.made, gradient)
        if self.odd is None and (weight := _first_odd(self.model.parameters)):
            self.odd = Odd(number=graph.number, weight=weight)
        self.sums.take_gradients(self.model.parameters)
        self._activations.end()
        return None if graph.received is None else graph.received.grad

    def add_to_copy(self, parts: Iterable[np.ndarray[Any, Any]]) -> None:
        """`reduced` is a copy of the own sums and `parts`, flat each, in their order; one is
        held at a time. It stays what it was if one cannot be had."""
        reduced = self.sums.flat.clone()
        for part in parts:
            reduced += torch.from_numpy(part).to(reduced.device)
            del part  # before the next one is asked for
        self._reduced = reduced

    def shared_gradient(self, name: str) -> Tensor:
        """The view of `name` in `reduced`: the other end's part is added to it in place."""
        return self.sums.split(self.reduced)[name]

    def prepare(self, divisor: float) -> Prepared:
        """Divide the reduced sums."""
        gradient = self.reduced.div_(divisor)
        odd = self.sums.first_non_finite(gradient)
        own = [v for n, v in self.sums.split(gradient).items() if n not in self.shared]
        squares = [torch.linalg.vector_norm(one, dtype=torch.float64) ** 2 for one in own]
        total = float(torch.stack(squares).sum()) if squares else 0.0
        return Prepared(sum_squares=total, odd=odd or "")

    def apply(self, scale: float) -> None:
        """One optimizer update with the prepared gradient times `scale`."""
        self.optimizer.apply(self.sums.split(self.reduced.mul_(scale)))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The weights in host memory (views, where they are there already). Raises BoundaryError
        while their memory is given back."""
        if any(p.untyped_storage().size() == 0 for p in self.model.parameters.values()):
            raise BoundaryError("trainer", "this stage gave its weights back", retryable=False)
        return {name: p.detach().cpu().numpy() for name, p in self.model.parameters.items()}

    def staged(self) -> dict[str, Tensor]:
        """Host memory for every weight, to be pulled into and then written by `write`."""
        return {
            name: torch.empty_like(p, device="cpu", requires_grad=False)
            for name, p in self.model.parameters.items()
        }

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.parameters.items():
                parameter.copy_(tensors[name])


def trained_positions(micro_step: MicroStep) -> Tensor:
    """Flat positions of all trained tokens, path by path, shape [M]."""
    ranges = [torch.arange(a, b) for path in micro_step.paths for a, b in path.trained]
    return torch.cat(ranges)


def _trained_tokens(micro_step: MicroStep, dtype: torch.dtype, device: torch.device) -> Trained:
    """Per-token and per-path tensors of the paths with tokens; checks T_j against what is there."""
    paths = [one for one in micro_step.paths if one.trained]
    nums = [sum(b - a for a, b in one.trained) for one in paths]
    for one, num_trained in zip(paths, nums, strict=True):
        if num_trained != one.num_path_tokens or one.trained[0][0] == one.pieces[0][0]:
            raise InvariantError(f"what {one.turn} trains in {micro_step.number} is wrong")

    def numbers(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Trained(
        logp_rollout=numbers(micro_step.logprobs)[trained_positions(micro_step).to(device)],
        path_of_token=torch.repeat_interleave(torch.arange(len(paths)), torch.tensor(nums)).to(
            device
        ),
        advantages=numbers([one.advantage for one in paths]),
        num_path_tokens=numbers(nums),
        num_execution_tokens=numbers([one.num_execution_tokens for one in paths]),
    )


def _first_odd(parameters: Mapping[str, nn.Parameter]) -> str:
    """Name of the first weight whose gradient is not finite, "" if none. A norm costs one reading
    of the gradients and is finite only if all numbers are; one that only overflows is looked at."""
    named = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    norms = torch.stack(torch._foreach_norm(list(named.values())))
    if bool(norms.isfinite().all()):
        return ""
    return next((name for name, one in named.items() if not bool(one.isfinite().all())), "")


def _check_trainable(parameters: Mapping[str, nn.Parameter], temperature: float) -> None:
    if not temperature > 0:
        raise ConfigError(f"temperature {temperature} cannot be trained on; it must be above 0")
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"weight {name} is {parameter.dtype}; the embedded trainer needs float32 or float64"
            )
        if parameter.is_inference():
            raise InvariantError(f"weight {name} was made in inference mode and cannot be trained")


def free_memory() -> None:
    """Give what was freed back to the device and, where the C library can, to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
