"""A cell backend on a causal language model in this process, shared with the rollout engine.

Owns: the training side of the module: its buffers, gradient sums, the frozen reference if the loss
has a divergence, and on the core the optimizer.
Must not know processes, streams or the engine. Invariants: weights are written in place only;
gradients are unnormalised sums until `update`; weights of one step have one version (P7); a
number that is not finite never reaches the weights (P20); there is no dropout in either role.
"""

import ctypes
import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep, Rendezvous, StageTimes, StepCounts, UpdateNorms
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.weights import Snapshot, WeightPlane
from opengyre.trainer.flat import FlatSums
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.objectives.kl import k3
from opengyre.trainer.objectives.signature import Trained
from opengyre.trainer.optimizer import AdamWSettings, CoreOptimizer
from opengyre.trainer.packed_model import ATTENTION, register_attention, trained_logprobs
from opengyre.trainer.reference import Reference
from opengyre.trainer.sums import StepLedger
from opengyre.trainer.wire import add_counts, execution_share
from opengyre.transport.snapshots import pull_named

SUMS = "sums"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """`temperature` is the sampler's: recorded logprobs are of the scaled distribution."""

    loss: StreamedLoss
    optimizer: AdamWSettings
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineSide:
    """What the module was before training, to be put back."""

    attention: str
    is_training: bool
    is_trainable_by_name: dict[str, bool]


class EmbeddedCell:
    """`module` is a transformers causal LM in float32 or float64 on one device; the engine may
    hold it too, its names are those of `named_parameters()` (tied weights once). Its weights are
    the run's initial ones: with a divergence in the loss they are copied here. The two planes
    carry weights and gradient sums; this object owns neither."""

    def __init__(
        self,
        module: nn.Module,
        *,
        weights: WeightPlane,
        gradients: WeightPlane,
        settings: EmbeddedSettings,
    ) -> None:
        self._module = module
        self._config: Any = module.config
        self._parameters = dict(module.named_parameters())
        self._weights_plane = weights
        self._gradients_plane = gradients
        self._settings = settings
        self._ledger = StepLedger()
        self._sums: FlatSums | None = None
        self._reduced: Tensor | None = None
        self._optimizer: CoreOptimizer | None = None
        self._engine_side: _EngineSide | None = None
        self._reference = Reference(module) if settings.loss.kl_coefficient else None
        _check_trainable(self._parameters, settings.temperature)

    def enter_training(self) -> None:
        """Take the module and the gradient buffer. Idempotent."""
        if self._engine_side is not None:
            return
        register_attention()
        self._engine_side = _EngineSide(
            attention=self._config._attn_implementation,
            is_training=self._module.training,
            is_trainable_by_name={n: p.requires_grad for n, p in self._parameters.items()},
        )
        self._config._attn_implementation = ATTENTION
        self._module.eval()
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._sums = FlatSums(self._parameters)
        if self._reference is not None:
            self._reference.place()

    def leave_training(self) -> None:
        """Give the module back as it was; memory of gradients is free on return. Idempotent."""
        before, self._engine_side = self._engine_side, None
        if before is None:
            return
        self._ledger.forget()
        self._sums = self._reduced = None
        if self._reference is not None:
            self._reference.remove()
        self._config._attn_implementation = before.attention
        self._module.train(before.is_training)
        for name, parameter in self._parameters.items():
            parameter.grad = None
            parameter.requires_grad_(before.is_trainable_by_name[name])
        _free_memory()

    def open_step(self, step: int, version: int, snapshot: Snapshot | None) -> int:
        verified = version if snapshot is None else self.load(snapshot)
        self._held_sums().flat.zero_()
        self._reduced = None
        self._ledger.open(step, verified)
        return verified

    def run(self, micro_step: MicroStep) -> StepCounts:
        """Raises BoundaryError for work of another step or version; sums are then untouched."""
        sums = self._held_sums()
        self._ledger.check_micro_step(micro_step)
        for parameter in self._parameters.values():
            parameter.grad = None
        counts = StepCounts(
            num_executions=execution_share(micro_step),
            num_tokens=micro_step.num_trained_tokens,
            micro_steps=[micro_step.number],
        )
        if counts.num_tokens:
            counts = add_counts(counts, self._backward(micro_step))
        sums.take_gradients(self._parameters)
        return self._ledger.add(counts)

    def drop_sums(self) -> None:
        if self._sums is not None:
            self._sums.flat.zero_()
        self._reduced = None
        self._ledger.forget()

    def settle(self, step: int) -> tuple[StepCounts, list[StageTimes]]:
        self._ledger.check_open(step)
        return self._ledger.counts, [StageTimes()]

    def reduce_together(
        self, step: int, rendezvous: Rendezvous, others: list[StepCounts]
    ) -> StepCounts:
        """These cells are in no group: their sums travel as a star."""
        raise BoundaryError("reduce", f"this cell is not in {rendezvous.name}", retryable=False)

    def expose_gradients(self, step: int) -> tuple[Snapshot, StepCounts]:
        self._ledger.check_open(step)
        sums = {SUMS: self._held_sums().flat.cpu().numpy()}
        part = self._gradients_plane.expose(sums, step)
        return Snapshot(version=step, parts=[part]), self._ledger.counts

    def reduce(self, members: Sequence[tuple[Snapshot, StepCounts]]) -> StepCounts:
        """Raises BoundaryError if a member's sums cannot be pulled; own sums are untouched."""
        total = self._ledger.total_with(members)
        reduced = self._held_sums().flat.clone()
        pulled = torch.empty_like(reduced, device="cpu")
        for snapshot, _ in members:
            pull_named(self._gradients_plane, snapshot, {SUMS: pulled.numpy()})
            reduced += pulled.to(reduced.device)
        self._reduced = reduced
        self._ledger.reduced = total
        return total

    def update(self, version: int) -> UpdateNorms:
        """One AdamW update with the reduced sums, or none and the reason; then no step is open."""
        counts = self._ledger.take_reduced()
        gradient = self._reduced
        if gradient is None or version != self._ledger.version + 1:
            raise InvariantError(f"update to {version} from {self._ledger.version}")
        norms = self._apply(gradient, counts)
        self.drop_sums()
        return norms

    def expose_weights(self, version: int) -> Snapshot:
        part = self._weights_plane.expose(self._arrays(), version)
        return Snapshot(version=version, parts=[part])

    def load(self, snapshot: Snapshot) -> int:
        """Stage, verify, then write in place: a failed pull leaves the weights as they were."""
        staged = {n: torch.empty_like(p, device="cpu") for n, p in self._parameters.items()}
        into = {name: tensor.detach().numpy() for name, tensor in staged.items()}
        verified = pull_named(self._weights_plane, snapshot, into)
        self._write(staged)
        return verified

    def save(self, folder: str) -> None:
        """model.safetensors, optimizer.safetensors and trainer.json."""
        optimizer = self._core_optimizer()
        weights = {name: p.detach() for name, p in self._parameters.items()}
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        save_file(optimizer.state(), Path(folder) / "optimizer.safetensors")
        state = {"schema": SCHEMA, "num_updates": optimizer.num_updates}
        (Path(folder) / "trainer.json").write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: str) -> None:
        """Raises BoundaryError for another schema, a missing file or a weight that differs."""
        try:
            state = json.loads((Path(folder) / "trainer.json").read_text(encoding="utf-8"))
            weights = load_file(Path(folder) / "model.safetensors")
            moments = load_file(Path(folder) / "optimizer.safetensors")
        except OSError as error:
            raise BoundaryError("checkpoint", str(error), retryable=False) from error
        _check_checkpoint(state, weights, self._parameters)
        self._core_optimizer().load_state(moments, num_updates=int(state["num_updates"]))
        self._write(weights)

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: array.copy() for name, array in self._arrays().items()}

    def _backward(self, micro_step: MicroStep) -> StepCounts:
        """Adds this micro-step's gradient to `.grad`; returns what only the model can tell."""
        dtype = self._held_sums().flat.dtype
        device = self._held_sums().flat.device
        targets = _targets(micro_step).to(device)
        trained = _trained_tokens(micro_step, targets, dtype)
        forward = partial(
            trained_logprobs,
            token_ids=torch.tensor(micro_step.token_ids, device=device),
            position_ids=torch.tensor(micro_step.position_ids, device=device),
            segments=micro_step.segments,
            targets=targets,
            temperature=self._settings.temperature,
        )
        logp_reference = None if self._reference is None else self._reference.run(forward)
        logp_new = forward(self._module)
        loss, num_clipped = self._settings.loss.summed(logp_new, trained, logp_reference)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward is untyped
        divergence = 0.0
        if logp_reference is not None:
            divergence = float(k3(logp_new.detach(), logp_reference).sum())
        return StepCounts(
            loss_sum=float(loss.detach()), num_clipped=num_clipped, divergence_sum=divergence
        )

    def _apply(self, gradient: Tensor, counts: StepCounts) -> UpdateNorms:
        optimizer = self._core_optimizer()
        rate = optimizer.learning_rate
        if counts.num_tokens == 0:
            return _not_applied("the step has no trainable token", rate)
        divisor = self._settings.loss.divisor(counts)
        gradient.div_(divisor)
        odd = self._held_sums().first_non_finite(gradient)
        if odd is not None:
            return _not_applied(f"the gradient of {odd} is not finite", rate)
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        gradient.mul_(min(1.0, self._settings.optimizer.max_grad_norm / (norm + 1e-6)))
        optimizer.apply(self._held_sums().split(gradient))
        loss = counts.loss_sum / divisor
        return UpdateNorms(grad_norm=norm, loss=loss, learning_rate=rate, is_applied=True)

    def _core_optimizer(self) -> CoreOptimizer:
        """Made at the first use: satellites never hold its state."""
        if self._optimizer is None:
            self._optimizer = CoreOptimizer(self._parameters, self._settings.optimizer)
        return self._optimizer

    def _held_sums(self) -> FlatSums:
        if self._sums is None:
            raise BoundaryError("trainer", "the cell is not in training", retryable=False)
        return self._sums

    def _arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The weights in host memory (views, where they are there already)."""
        return {name: p.detach().cpu().numpy() for name, p in self._parameters.items()}

    def _write(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])


def _targets(micro_step: MicroStep) -> Tensor:
    """Flat positions of all trained tokens, path by path, shape [M]."""
    ranges = [torch.arange(a, b) for path in micro_step.paths for a, b in path.trained]
    return torch.cat(ranges)


def _trained_tokens(micro_step: MicroStep, targets: Tensor, dtype: torch.dtype) -> Trained:
    """Per-token and per-path tensors of the paths with tokens; checks T_j against what is there."""
    paths = [one for one in micro_step.paths if one.trained]
    nums = [sum(b - a for a, b in one.trained) for one in paths]
    for one, num_trained in zip(paths, nums, strict=True):
        if num_trained != one.num_path_tokens or one.trained[0][0] == one.pieces[0][0]:
            raise InvariantError(f"what {one.turn} trains in {micro_step.number} is wrong")
    device = targets.device
    path_of_token = torch.repeat_interleave(torch.arange(len(paths)), torch.tensor(nums))

    def numbers(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Trained(
        logp_rollout=numbers(micro_step.logprobs)[targets],
        path_of_token=path_of_token.to(device),
        advantages=numbers([one.advantage for one in paths]),
        num_path_tokens=numbers(nums),
        num_execution_tokens=numbers([one.num_execution_tokens for one in paths]),
    )


def _not_applied(reason: str, learning_rate: float) -> UpdateNorms:
    return UpdateNorms(
        grad_norm=0.0, loss=0.0, learning_rate=learning_rate, is_applied=False, reason=reason
    )


def _check_trainable(parameters: dict[str, nn.Parameter], temperature: float) -> None:
    if not temperature > 0:
        raise ConfigError(f"temperature {temperature} cannot be trained on; it must be above 0")
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"weight {name} is {parameter.dtype}; the embedded trainer needs float32 or float64"
            )
        if parameter.is_inference():
            raise InvariantError(f"weight {name} was made in inference mode and cannot be trained")


def _check_checkpoint(
    state: Any, weights: dict[str, Tensor], parameters: dict[str, nn.Parameter]
) -> None:
    if state.get("schema") != SCHEMA:
        raise BoundaryError(
            "checkpoint", f"schema {state.get('schema')}, expected {SCHEMA}", retryable=False
        )
    ours = {name: (p.shape, p.dtype) for name, p in parameters.items()}
    theirs = {name: (t.shape, t.dtype) for name, t in weights.items()}
    odd = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    if odd:
        raise BoundaryError("checkpoint", f"weight {odd[0]} does not fit", retryable=False)


def _free_memory() -> None:
    """Give what was freed back to the device and, where the C library can, to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
