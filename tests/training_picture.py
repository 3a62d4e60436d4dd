"""Draws one step of three cells of two stages, as it ran: `python -m tests.training_picture FILE`.

The stream, the cells, the executor, gloo, the snapshot's pull and the reduction are the real ones;
stages are threads, and each forward and backward of the tiny model lasts as long as its tokens ask
for, so that there is something to see. The script says when groups get ready and when cells leave
rollout, and does with claims what a cell's process does.
"""

import copy
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.cells import MicroStep, Rendezvous, StepCounts
from opengyre.trainer.embedded import EmbeddedCell
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.prefix_groups import GroupStore
from opengyre.trainer.stage import Stage, StageSettings
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.trajectory.bundles import Bundle
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.stage_threads import staged_cell
from tests.training_rows import line_row
from tests.training_svg import Kind, Span, svg_of

NUM_STAGES = 2
NUM_CELLS = 3
NUM_GROUPS = 10
NUM_MEMBERS = 4
BUDGET_TOKENS = 64
FORWARD_S = 0.0010
"""Of one token; backward takes twice as long."""
READY_S = (0.0, 0.0, 0.2, 0.45, 0.6, 1.8, 1.8, 1.8, 2.05, 2.25)
"""When each group is ready; nothing comes for a while after the fifth."""
LEAVES_S = (0.0, 0.42, 1.95)
"""When each cell is there to join."""
END_S = 60.0
SETTINGS = StageSettings(loss=StreamedLoss(), optimizer=AdamWSettings(learning_rate=1e-2))


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            tie_word_embeddings=True,
        )
    )


def groups_of(seed: int) -> dict[str, list[Bundle]]:
    numbers = np.random.default_rng(seed)
    return {
        f"g{group}": [
            _bundle(f"e{group}.{member}", f"g{group}", int(numbers.integers(14, 46)))
            for member in range(NUM_MEMBERS)
        ]
        for group in range(NUM_GROUPS)
    }


def _bundle(execution: str, group: str, num_tokens: int) -> Bundle:
    advantage = 1.0 if execution.endswith(("0", "2")) else -1.0
    row = line_row(execution, num_tokens, group=group, advantage=advantage)
    return Bundle(rows=(row,), cost_tokens=row.cost_tokens)


@dataclass(slots=True)
class Trace:
    """What was done when, from `began_s` on."""

    began_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def add(self, kind: Kind, begin_s: float, **of: int) -> None:
        self.spans.append(Span(kind=kind, begin_s=begin_s, end_s=self.now_s(), **of))

    def watch(self, cell: int) -> Callable[[int, Stage], None]:
        """Stages of `cell` tell what they do, and take their time."""

        def watch(number: int, stage: Stage) -> None:
            forward, backward = stage.forward, stage.backward
            tokens: dict[int, MicroStep] = {}

            def slow_forward(micro_step: MicroStep, received: Any) -> Any:
                begin_s = self.now_s()
                passed = forward(micro_step, received)
                tokens[id(passed)] = micro_step
                self._wait(Kind.FORWARD, begin_s, micro_step, cell=cell, stage=number)
                return passed

            def slow_backward(passed: Any, gradient: Any) -> Any:
                begin_s = self.now_s()
                upstream = backward(passed, gradient)
                self._wait(Kind.BACKWARD, begin_s, tokens.pop(id(passed)), cell=cell, stage=number)
                return upstream

            stage.forward = slow_forward  # type: ignore[method-assign]
            stage.backward = slow_backward  # type: ignore[method-assign]

        return watch

    def _wait(self, kind: Kind, begin_s: float, made: MicroStep, **of: int) -> None:
        num_tokens = len(made.token_ids)
        last_s = FORWARD_S * num_tokens * (2 if kind is Kind.BACKWARD else 1)
        time.sleep(max(0.0, begin_s + last_s - self.now_s()))
        self.add(kind, begin_s, number=made.number, num_tokens=num_tokens, **of)


class Desk:
    """The controller's side of claims."""

    def __init__(self, stream: StepStream, trace: Trace) -> None:
        self.stream = stream
        self.trace = trace
        self.changed = threading.Condition()
        self.joining: set[int] = set()

    def ready(self, groups: Sequence[int]) -> None:
        with self.changed:
            waiting = [f"g{one}" for one in groups]
            self.stream.offer([one for one in waiting if one not in self.stream.assigned])
            now_s = self.trace.now_s()
            self.trace.add(Kind.READY, now_s, number=groups[-1])
            self.changed.notify_all()

    def claim(self, cell: int) -> MicroStep | None:
        with self.changed:
            made = self.stream.claim(cell, self.trace.now_s()).micro_step
            if not self.stream.is_closed and len(self.stream.assigned) == NUM_GROUPS:
                self.stream.close(NUM_GROUPS)
                self.trace.add(Kind.CLOSED, self.trace.now_s())
            return made

    def done(self, cell: int, counts: StepCounts) -> None:
        with self.changed:
            for number in counts.micro_steps:
                assert self.stream.done(cell, number, self.trace.now_s())
            self.changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self.stream.is_drained and not self.joining

    def wait(self) -> None:
        with self.changed:
            if not self.is_over:
                self.changed.wait(0.2)


def work(desk: Desk, cell: EmbeddedCell, number: int) -> None:
    """Claim, run, tell; one claim ahead; what is in flight ends while none comes."""
    ahead: MicroStep | None = None
    num_in_flight, rest_s = 0, desk.trace.now_s()

    def tell(counts: StepCounts) -> None:
        nonlocal num_in_flight, rest_s
        desk.done(number, counts)
        num_in_flight -= len(counts.micro_steps)
        rest_s = desk.trace.now_s()

    while not desk.is_over:
        made, ahead = ahead or desk.claim(number), None
        if made is None:
            if num_in_flight:
                tell(cell.finish_one())
            else:
                desk.wait()
            continue
        if not num_in_flight:
            for stage in range(NUM_STAGES):
                desk.trace.add(Kind.REST, rest_s, cell=number, stage=stage)
        ahead = desk.claim(number)
        num_in_flight += 1
        tell(cell.run(made))


def join(desk: Desk, cells: dict[int, EmbeddedCell], number: int, snapshot: Any) -> None:
    """As the controller admits a satellite: a member first, then its pull, then its claims."""
    with desk.changed:
        assert not desk.stream.is_closed
        desk.stream.admit(number)
        desk.joining.add(number)
    begin_s = desk.trace.now_s()
    cells[number].open_step(0, 0, snapshot)
    for stage in range(NUM_STAGES):
        desk.trace.add(Kind.PULL, begin_s, cell=number, stage=stage)
    with desk.changed:
        desk.joining.discard(number)
        desk.changed.notify_all()
    work(desk, cells[number], number)


def end(desk: Desk, cells: dict[int, EmbeddedCell], store: str) -> None:
    """Settle at one barrier, reduce together, update."""
    trace, pool = desk.trace, ThreadPoolExecutor(NUM_CELLS)

    def all_do(kind: Kind, act: Callable[[int], Any]) -> dict[int, Any]:
        def one(number: int) -> Any:
            begin_s = trace.now_s()
            answer = act(number)
            for stage in range(NUM_STAGES):
                trace.add(kind, begin_s, cell=number, stage=stage)
            return answer

        return dict(zip(cells, pool.map(one, cells), strict=True))

    with pool:
        settled = all_do(Kind.SETTLE, lambda number: cells[number].settle(0))
        counts = {number: told for number, (told, _) in settled.items()}

        def reduce(number: int) -> StepCounts:
            meeting = Rendezvous(store=store, name="all/1", rank=number, size=NUM_CELLS)
            others = [told for other, told in counts.items() if other != number]
            return cells[number].reduce_together(0, meeting, others)

        total = all_do(Kind.REDUCE, reduce)[0]
        assert sorted(total.micro_steps) == desk.stream.done_counts().micro_steps
    begin_s = trace.now_s()
    assert cells[0].update(1).is_applied
    for stage in range(NUM_STAGES):
        trace.add(Kind.UPDATE, begin_s, cell=0, stage=stage)


def drive(desk: Desk, cells: dict[int, EmbeddedCell]) -> None:
    """Groups get ready and cells join at their times; returns when the step is drained."""
    snapshot = cells[0].expose_weights(0)
    cells[0].open_step(0, 0, None)
    desk.stream.admit(0)
    desk.trace.began_s = time.monotonic()
    starts = [lambda: work(desk, cells[0], 0)]
    starts += [lambda n=n: join(desk, cells, n, snapshot) for n in range(1, NUM_CELLS)]
    events: list[tuple[float, Callable[[], None]]] = []
    with ThreadPoolExecutor(NUM_CELLS) as pool:
        tasks = []
        for number, at_s in enumerate(READY_S):
            events.append((at_s, lambda n=number: desk.ready(range(n + 1))))
        for number, at_s in enumerate(LEAVES_S):
            events.append((at_s, lambda n=number: tasks.append(pool.submit(starts[n]))))
        for at_s, act in sorted(events, key=lambda one: one[0]):
            time.sleep(max(0.0, at_s - desk.trace.now_s()))
            act()
        for task in tasks:
            task.result(END_S)


def drawn(seed: int = 4) -> list[Span]:
    """One step, from its opening to the update."""
    torch.set_num_threads(1)
    trace, groups = Trace(), groups_of(seed)
    settings = StreamSettings(
        budget_tokens=BUDGET_TOKENS,
        lease_s=END_S,
        max_groups=NUM_GROUPS,
        parts_per_cell=NUM_STAGES + 1,
    )
    stream = StepStream(0, version=0, bundles_of=groups.__getitem__, settings=settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, cells = tiny_model(), dict[int, EmbeddedCell]()
        for number in range(NUM_CELLS):
            cells[number] = stack.enter_context(
                staged_cell(
                    copy.deepcopy(model),
                    num_stages=NUM_STAGES,
                    settings=SETTINGS,
                    make_plane=lambda name, n=number: stack.enter_context(
                        closing(SharedMemoryPlane(folder, slot=f"c{n}-{name}"))
                    ),
                    is_core=number == 0,
                    watch=trace.watch(number),
                )
            )
            cells[number].enter_training()
        store = stack.enter_context(closing(GroupStore()))
        desk = Desk(stream, trace)
        drive(desk, cells)
        end(desk, cells, store.address)
    return trace.spans


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg_of(drawn()), encoding="utf-8")
