"""A toy model cut into pipeline stages, and a process that serves one of them.

`python pipeline_toy.py` reads one JSON line per pipeline to serve (the fields of `Served`) and
answers each with one line: a `Report`, or the error that ended it. A trap prints a line and stands
still inside the part. NUM_LAYERS linear layers in float64, each with its own seed.
"""

import base64
import gc
import resource
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from opengyre.seams.cells import MicroStep, StageTimes
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.pipeline.follower import Follower
from opengyre.trainer.pipeline.link import open_link
from opengyre.trainer.pipeline.parts import Passed, Told

NUM_LAYERS = 8
HIDDEN = 16
VOCABULARY = 50
LIVE_AT = (1020, 1400)
"""The micro-steps at which a stage counts what it holds."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """`trap`: stand still in the forward (or backward) of that micro-step."""

    store: str
    name: str
    stage: int
    num_stages: int
    num_serves: int = 1
    has_reference: bool = False
    trap: tuple[str, int] = ("", -1)


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage holds when a forward begins."""

    num_tensors: int
    num_graphs: int
    num_held: int
    resident_bytes: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`live`: by number of the micro-step. `lived_s`: least and most of what `times` add up to."""

    sums: dict[str, str] = {}
    times: StageTimes = StageTimes()
    lived_s: tuple[float, float] = (0.0, 0.0)
    live: dict[int, Live] = {}
    most_in_flight: int = 0
    error: str = ""


class Graph:
    """A micro-step in flight on a stage."""

    def __init__(self, entry: Tensor | None, exit: Tensor, number: int) -> None:
        self.entry = entry
        self.exit = exit
        self.number = number


def linear(layer: int) -> nn.Linear:
    torch.manual_seed(layer)
    return nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)


def embedded(micro_step: MicroStep) -> Tensor:
    """[T, HIDDEN], fixed."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator)
    return table[torch.tensor(micro_step.token_ids)]


class ToyPart:
    """Layers of one stage. `sums` grow by each backward."""

    def __init__(self, stage: int, num_stages: int, has_reference: bool = False) -> None:
        share = NUM_LAYERS // num_stages
        here = range(stage * share, (stage + 1) * share)
        self.layers = {f"layer{k}": linear(k) for k in here}
        self.frozen = [linear(100 + k) for k in here] if has_reference else []
        self.is_last = stage == num_stages - 1
        self.sums = {
            f"{name}.{part}": torch.zeros_like(p)
            for name, layer in self.layers.items()
            for part, p in layer.named_parameters()
        }
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.most_in_flight = 0
        self.trap: tuple[str, int] = ("", -1)
        self.live: dict[int, Live] = {}
        self.link: Any = None

    def forward(self, micro_step: MicroStep, received: Tensor | None) -> Passed:
        self._watch("forward", micro_step.number)
        source = embedded(micro_step)[None] if received is None else received
        entry = None if received is None else received[0].clone().requires_grad_()
        line = source[0] if entry is None else entry
        for layer in self.layers.values():
            line = torch.tanh(layer(line))
        lines = [line, *self._reference(source)]
        told = None
        if self.is_last:
            line, told = self._loss(lines, micro_step)
        graph = Graph(entry, line, micro_step.number)
        self.graphs.add(graph)
        self.most_in_flight = max(self.most_in_flight, len(self.graphs))
        sent = None if self.is_last else torch.stack([one.detach() for one in lines])
        return Passed(sent=sent, told=told, graph=graph)

    def backward(self, passed: Passed, gradient: Tensor | None) -> Tensor | None:
        graph: Graph = passed.graph
        self._watch("backward", graph.number)
        graph.exit.backward(gradient)
        for name, layer in self.layers.items():
            for part, p in layer.named_parameters():
                self.sums[f"{name}.{part}"] += p.grad
                p.grad = None
        return None if graph.entry is None else graph.entry.grad

    def _reference(self, source: Tensor) -> list[Tensor]:
        """The line of the frozen weights; on the first stage it starts from the same tokens."""
        if not self.frozen:
            return []
        line = source[-1]
        with torch.no_grad():
            for layer in self.frozen:
                line = torch.tanh(layer(line))
        return [line]

    def _loss(self, lines: list[Tensor], micro_step: MicroStep) -> tuple[Tensor, Told]:
        weights = torch.tensor(micro_step.logprobs, dtype=torch.float64)
        distance = (lines[0] - lines[1]).square().sum() if len(lines) == 2 else torch.zeros(())
        loss = (lines[0].sum(1) * weights).sum() + 0.1 * distance
        return loss, Told(
            loss_sum=float(loss.detach()),
            num_clipped=len(micro_step.token_ids),
            divergence_sum=float(distance.detach()),
        )

    def _watch(self, where: str, number: int) -> None:
        if (where, number) == self.trap:
            say("trapped")
            time.sleep(600)
        if where == "forward" and number in LIVE_AT:
            gc.collect()
            num_tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
            held = self.link.num_held if self.link is not None else 0
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.live[number] = Live(
                num_tensors=num_tensors,
                num_graphs=len(self.graphs),
                num_held=held,
                resident_bytes=pages * resource.getpagesize(),
            )


def packed(sums: dict[str, Tensor]) -> dict[str, str]:
    return {n: base64.b64encode(t.numpy().tobytes()).decode() for n, t in sums.items()}


class Lifetime:
    """Brackets the making of an executor, then the reading of its times."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._before_s = time.monotonic()
        self.executor = make()
        self._after_s = time.monotonic()

    def report(self, part: ToyPart) -> Report:
        least_s = time.monotonic() - self._after_s
        times = self.executor.times
        return Report(
            sums=packed(part.sums),
            times=times,
            lived_s=(least_s, time.monotonic() - self._before_s),
            live=part.live,
            most_in_flight=part.most_in_flight,
        )


def serve(served: Served) -> Report:
    part = ToyPart(served.stage, served.num_stages, served.has_reference)
    part.trap = served.trap
    place = {"stage": served.stage, "num_stages": served.num_stages}
    link = open_link(served.store, name=served.name, **place)
    part.link = link
    life = Lifetime(lambda: Follower(part, link=link, **place))
    try:
        for _ in range(served.num_serves):
            life.executor.serve()
    except BoundaryError as error:
        return Report(error=str(error))
    else:
        return life.report(part)
    finally:
        link.close()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        say(msgspec.json.encode(serve(msgspec.json.decode(line, type=Served))).decode())
