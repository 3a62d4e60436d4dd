"""A cell backend on a causal language model, cut into pipeline stages or whole in this process.

Owns: the order of what the stages do, and the books of the step. Must not know processes, streams
or the engine. Invariants: all stages do the same steps in the same order; gradients are
unnormalised sums until `update`; weights of one step have one version (P7); what one stage finds
not finite, no stage applies (P20); there is no dropout in either role.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import nn

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep, Rendezvous, StageTimes, StepCounts, UpdateNorms
from opengyre.seams.errors import BoundaryError
from opengyre.seams.memory import MemoryHeld, all_held
from opengyre.seams.weights import Snapshot, WeightPlane
from opengyre.trainer import orders as o
from opengyre.trainer.checkpoint import write_index
from opengyre.trainer.desk import Place, StageDesk
from opengyre.trainer.followers import RemoteStage
from opengyre.trainer.pipeline.lead import Lead
from opengyre.trainer.pipeline.link import Link
from opengyre.trainer.pipeline.parts import Finished, Told
from opengyre.trainer.stage import StageSettings
from opengyre.trainer.sums import StepLedger
from opengyre.trainer.whole_model import WholeModel
from opengyre.trainer.wire import add_counts, execution_share
from opengyre.transport.snapshots import pull_named

SCHEMA = 1
Answer = TypeVar("Answer", bound=o.Order)


def whole_cell(
    module: nn.Module, *, weights: WeightPlane, gradients: WeightPlane, settings: StageSettings
) -> "EmbeddedCell":
    """A cell of one stage on `module`, a causal language model of transformers."""
    model = WholeModel(module, temperature=settings.temperature)
    desk = StageDesk(model, settings=settings, place=Place(), weights=weights, gradients=gradients)
    return EmbeddedCell(desk, settings=settings)


class EmbeddedCell:
    """`desk` has the first stage, `followers` the others; `link` joins them (None: one stage).
    `is_core`: its weights outlive its training."""

    def __init__(
        self,
        desk: StageDesk,
        *,
        settings: StageSettings,
        followers: Sequence[RemoteStage] = (),
        link: Link | None = None,
        is_core: bool = True,
    ) -> None:
        self._desk = desk
        self._settings = settings
        self._followers = list(followers)
        self._lead = Lead(desk.stage, link=link, num_stages=1 + len(self._followers))
        self._is_core = is_core
        self._ledger = StepLedger()
        self._is_serving = False
        self._followed = [StageTimes()] * len(self._followers)
        self._untold = StepCounts()
        self._before: list[StageTimes] = []
        self._opened_s = 0.0

    @property
    def num_stages(self) -> int:
        return 1 + len(self._followers)

    def enter_training(self) -> None:
        """Take the modules and the gradient buffers. Idempotent."""
        self._all(o.Did, lambda _: o.Enter())

    def leave_training(self) -> None:
        """Give the module back as it was; memory of gradients is free on return. Idempotent."""
        self._forget()
        self._all(o.Did, lambda stage: o.Leave(keeps_weights=self._is_core or stage == 0))

    def held(self) -> MemoryHeld:
        return all_held(one.memory for one in self._all(o.Holding, lambda _: o.TellMemory()))

    def open_step(self, step: int, version: int, snapshot: Snapshot | None) -> int:
        self._forget()
        self._all(o.Did, lambda _: o.Open())
        verified = version if snapshot is None else self.load(snapshot)
        self._ledger.open(step, verified)
        self._before, self._opened_s = self._totals(), time.monotonic()
        return verified

    def run(self, micro_step: MicroStep) -> StepCounts:
        """Raises BoundaryError for work of another step or version; sums are then untouched."""
        self._ledger.start(micro_step)
        if not micro_step.num_trained_tokens:
            return self._told([Finished(number=micro_step.number, told=Told())])
        self._serve()
        return self._told(self._lead.run(micro_step))

    def finish_one(self) -> StepCounts:
        """After the last one all stages stand at one boundary, and wait without using a core."""
        ended = self._lead.finish_one()
        if self._is_serving and not self._lead.num_in_flight:
            ended += self._lead.pause()
        return self._told(ended)

    def settle(self, step: int) -> tuple[StepCounts, list[StageTimes]]:
        self._ledger.check_open(step)
        self._drain()
        found = self._all(o.Found, lambda _: o.FindOdd())
        return self._ledger.settled([one.odd for one in found]), self._step_times()

    def drop_sums(self) -> None:
        self._forget()
        self._all(o.Did, lambda _: o.Drop())

    def expose_gradients(self, step: int) -> tuple[Snapshot, StepCounts]:
        counts, _ = self.settle(step)
        parts = self._all(o.Shared, lambda _: o.ShareSums(step=step))
        return Snapshot(version=step, parts=[one.part for one in parts]), counts

    def reduce(self, members: Sequence[tuple[Snapshot, StepCounts]]) -> StepCounts:
        """Raises BoundaryError if a member's sums cannot be pulled; own sums are untouched."""
        snapshots = [snapshot for snapshot, _ in members]
        for snapshot in snapshots:
            self._ledger.check_open(snapshot.version)
        self.settle(self._ledger.step)
        total = self._ledger.total_with([counts for _, counts in members])
        self._all(o.Did, lambda _: o.AddSums(members=snapshots))
        self._ledger.reduced = total
        return total

    def reduce_together(
        self, step: int, rendezvous: Rendezvous, others: Sequence[StepCounts]
    ) -> StepCounts:
        self.settle(step)
        total = self._ledger.total_with(others)
        self._all(o.Did, lambda _: o.AddTogether(rendezvous=rendezvous))
        self._ledger.reduced = total
        return total

    def update(self, version: int) -> UpdateNorms:
        """One AdamW update with the reduced sums, or none and the reason; then no step is open."""
        counts = self._ledger.take_reduced()
        if version != self._ledger.version + 1:
            raise InvariantError(f"update to {version} from {self._ledger.version}")
        norms = self._update(counts)
        self.drop_sums()
        return norms

    def expose_weights(self, version: int, *, pinned: Sequence[int] = ()) -> Snapshot:
        order = o.ShareWeights(version=version, pinned=list(pinned))
        parts = self._all(o.Shared, lambda _: order)
        return Snapshot(version=version, parts=[one.part for one in parts])

    def load(self, snapshot: Snapshot) -> int:
        """Stage, verify, then write in place: a pull that fails at one stage leaves the weights of
        all as they were."""
        self._write_all(o.Pull(snapshot=snapshot))
        return snapshot.version

    def save(self, folder: str) -> None:
        """Weights and moments of all stages, their indexes, and trainer.json."""
        self._all(o.Did, lambda _: o.Save(folder=folder))
        for kind in ("model", "optimizer"):
            write_index(Path(folder), kind, num_stages=self.num_stages)
        state = {"schema": SCHEMA, "num_updates": self._desk.stage.optimizer.num_updates}
        (Path(folder) / "trainer.json").write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: str) -> None:
        """Raises BoundaryError for another schema, a missing file or a weight that differs."""
        try:
            state = json.loads((Path(folder) / "trainer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BoundaryError("checkpoint", str(error), retryable=False) from error
        if state.get("schema") != SCHEMA:
            what = f"schema {state.get('schema')}, expected {SCHEMA}"
            raise BoundaryError("checkpoint", what, retryable=False)
        num_updates = int(state["num_updates"])
        self._write_all(o.Restore(folder=folder, num_updates=num_updates))

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        parts = [one.part for one in self._all(o.Shared, lambda _: o.ReadWeights())]
        snapshot = Snapshot(version=0, parts=parts)
        dtype = self._desk.stage.sums_dtype
        into = {spec.name: np.empty(spec.shape, dtype=dtype) for spec in snapshot.tensors}
        pull_named(self._desk.gradients, snapshot, into)
        return into

    def _update(self, counts: StepCounts) -> UpdateNorms:
        rate = self._desk.stage.optimizer.learning_rate
        if counts.num_tokens == 0:
            return _not_applied("the step has no trainable token", rate)
        if counts.odd:
            return _not_applied(counts.odd, rate)
        self._join_tied()
        divisor = self._settings.loss.divisor(counts)
        made = [one.prepared for one in self._all(o.Ready, lambda _: o.Prepare(divisor=divisor))]
        if odd := [one.odd for one in made if one.odd]:
            return _not_applied(f"the sum of the gradients of {odd[0]} is not finite", rate)
        norm = math.sqrt(sum(one.sum_squares for one in made))
        if not math.isfinite(norm):
            return _not_applied("the norm of the gradients is not finite", rate)
        scale = min(1.0, self._settings.optimizer.max_grad_norm / (norm + 1e-6))
        self._all(o.Did, lambda _: o.Apply(scale=scale))
        loss = counts.loss_sum / divisor
        return UpdateNorms(grad_norm=norm, loss=loss, learning_rate=rate, is_applied=True)

    def _write_all(self, order: o.Pull | o.Restore) -> None:
        """If all stages have read what they need, all write it, else none does."""
        try:
            self._all(o.Did, lambda _: order)
        except BoundaryError:
            self._all(o.Did, lambda _: o.Write(is_accepted=False))
            raise
        self._all(o.Did, lambda _: o.Write(is_accepted=True))

    def _join_tied(self) -> None:
        """Both ends of a tied weight get the sum of its two gradients, and so stay the same."""
        if not self._followers or not self._desk.place.tied:
            return
        step, last = self._ledger.step, self.num_stages - 1
        ends = (0, last)
        shared = [self._one(o.Shared, end, o.ShareTied(step=step)).part for end in ends]
        self._one(o.Did, 0, o.AddTied(part=shared[1]))
        self._one(o.Did, last, o.AddTied(part=shared[0]))

    def _forget(self) -> None:
        """What is in flight ends, and no step is open."""
        self._drain()
        self._ledger.forget()
        self._untold = StepCounts()

    def _serve(self) -> None:
        if self._followers and not self._is_serving:
            self._is_serving = True
            for one in self._followers:
                one.send(o.Serve())

    def _drain(self) -> None:
        """Nothing is in flight, and every stage listens to orders again."""
        if not self._is_serving:
            return
        self._untold = self._told(self._lead.drain())
        self._is_serving = False
        served = [_expect(o.Served, one.answer()) for one in self._followers]
        self._followed = [one.times for one in served]

    def _totals(self) -> list[StageTimes]:
        """Of each stage since it began; what it waits while it does not serve comes in later."""
        return [self._lead.times, *self._followed]

    def _step_times(self) -> list[StageTimes]:
        """Of each stage since the step was opened; what is not work or bubble is waiting."""
        elapsed_s = time.monotonic() - self._opened_s
        return [
            _since(before, now, elapsed_s)
            for before, now in zip(self._before, self._totals(), strict=True)
        ]

    def _told(self, ended: Sequence[Finished]) -> StepCounts:
        """The counts of what ended, and of what did while something else was asked for."""
        untold, self._untold = self._untold, StepCounts()
        return add_counts(untold, self._booked(ended))

    def _booked(self, ended: Sequence[Finished]) -> StepCounts:
        """The counts of micro-steps that ended, added to the books."""
        total = StepCounts()
        for one in ended:
            micro_step = self._ledger.finish(one.number)
            counts = StepCounts(
                num_executions=execution_share(micro_step),
                num_tokens=micro_step.num_trained_tokens,
                loss_sum=one.told.loss_sum,
                num_clipped=one.told.num_clipped,
                divergence_sum=one.told.divergence_sum,
                micro_steps=[one.number],
            )
            total = add_counts(total, self._ledger.add(counts))
        return total

    def _all(self, kind: type[Answer], order: Callable[[int], o.Order]) -> list[Answer]:
        """All stages do `order(stage)` at the same time; raises what the first of them raised."""
        self._drain()
        for number, one in enumerate(self._followers, start=1):
            one.send(order(number))
        answers: list[o.Order] = []
        failures: list[BoundaryError] = []
        for ask in (lambda: self._desk.handle(order(0)), *(f.answer for f in self._followers)):
            try:
                answers.append(ask())
            except BoundaryError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return [_expect(kind, one) for one in answers]

    def _one(self, kind: type[Answer], stage: int, order: o.Order) -> Answer:
        if stage == 0:
            return _expect(kind, self._desk.handle(order))
        self._followers[stage - 1].send(order)
        return _expect(kind, self._followers[stage - 1].answer())


def _expect(kind: type[Answer], answer: o.Order) -> Answer:
    if not isinstance(answer, kind):
        raise InvariantError(f"a stage answered {type(answer).__name__}, not {kind.__name__}")
    return answer


def _since(before: StageTimes, now: StageTimes, elapsed_s: float) -> StageTimes:
    forward_s = now.forward_s - before.forward_s
    backward_s = now.backward_s - before.backward_s
    bubble_s = now.bubble_s - before.bubble_s
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        bubble_s=bubble_s,
        waiting_s=max(0.0, elapsed_s - forward_s - backward_s - bubble_s),
    )


def _not_applied(reason: str, learning_rate: float) -> UpdateNorms:
    return UpdateNorms(
        grad_norm=0.0, loss=0.0, learning_rate=learning_rate, is_applied=False, reason=reason
    )
