"""The pipeline executor against its bound and against torch's Schedule1F1B, by ratios of one run.

`python benchmarks/pipeline.py` prints the tables of benchmarks/README.md. Stage 0 is this process,
the others are spawned; all run the same script of cases in step, so both executors meet the same
noise. A stage is a stack of linear layers, or sleeps, which do not compete for the cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from opengyre.seams.cells import MicroStep
from opengyre.trainer.pipeline.follower import Follower
from opengyre.trainer.pipeline.groups import store_at
from opengyre.trainer.pipeline.lead import Lead
from opengyre.trainer.pipeline.link import Link, open_link
from opengyre.trainer.pipeline.parts import Passed, Told
from opengyre.trainer.prefix_groups import GroupStore

NUM_PROCESSES = 4
NUM_TOKENS = 256
WIDTH = 512
NUM_LAYERS = 4
FORWARD_S = 0.010
NUM_MICRO_STEPS = 16
ROUNDS = 9
MICRO_STEP = MicroStep(
    step=1,
    number=0,
    version=0,
    token_ids=list(range(NUM_TOKENS)),
    position_ids=list(range(NUM_TOKENS)),
    logprobs=[0.0] * NUM_TOKENS,
    segments=[],
    paths=[],
)


class Sleep(torch.autograd.Function):
    """1 part of time forward, 2 parts backward."""

    @staticmethod
    def forward(ctx: Any, line: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return line * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * FORWARD_S)
        return gradients[0] * 1.0, None


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, line: Tensor) -> Tensor:
        made: Tensor = Sleep.apply(line * self.weight, self.weight)
        return made


def stack() -> nn.Module:
    layers = [m for _ in range(NUM_LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


class Part:
    """`module` as a stage of our executor."""

    def __init__(self, module: nn.Module, *, is_last: bool, source: Tensor) -> None:
        self._module = module
        self._is_last = is_last
        self._source = source

    def forward(self, micro_step: MicroStep, received: Tensor | None) -> Passed:
        entry = self._source if received is None else received[0].requires_grad_()
        made = self._module(entry)
        if self._is_last:
            return Passed(sent=None, told=Told(), graph=(entry, made.sum()))
        return Passed(sent=made.detach()[None], graph=(entry, made))

    def backward(self, passed: Passed, gradient: Tensor | None) -> Tensor | None:
        entry, made = passed.graph
        made.backward(gradient)
        return entry.grad


@dataclass
class Bench:
    """One process' side of a stage count: both executors over the same module."""

    stage: int
    num_stages: int
    module: nn.Module
    link: Link
    group: Any

    def __post_init__(self) -> None:
        is_last = self.stage == self.num_stages - 1
        self.source = torch.ones(NUM_TOKENS, WIDTH)
        part = Part(self.module, is_last=is_last, source=self.source)
        end = {"link": self.link, "num_stages": self.num_stages}
        self.lead = Lead(part, **end) if self.stage == 0 else None
        self.follower = Follower(part, stage=self.stage, **end) if self.stage else None
        piped = PipelineStage(
            self.module, self.stage, self.num_stages, torch.device("cpu"), group=self.group
        )
        self.schedule = Schedule1F1B(
            piped, NUM_MICRO_STEPS, loss_fn=lambda made, _: made.sum(), scale_grads=False
        )

    def ours(self, drive: Callable[[Lead], None]) -> float:
        """Seconds on stage 0, drain included."""
        return self._timed(lambda: self._ours(drive))

    def torchs(self) -> float:
        return self._timed(self._torchs)

    def busy_s(self) -> float:
        """Of the busiest stage so far, forward and backward."""
        times = (self.lead or self.follower).times  # type: ignore[union-attr]
        busy = torch.tensor(times.forward_s + times.backward_s)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX, group=self.group)
        return float(busy)

    def _timed(self, work: Callable[[], None]) -> float:
        dist.barrier(group=self.group)
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s

    def _ours(self, drive: Callable[[Lead], None]) -> None:
        if self.lead is not None:
            drive(self.lead)
            self.lead.drain()
        elif self.follower is not None:
            self.follower.serve()

    def _torchs(self) -> None:
        whole = self.source.repeat(NUM_MICRO_STEPS, 1)
        if self.stage == 0:
            self.schedule.step(whole)
        elif self.stage == self.num_stages - 1:
            self.schedule.step(target=whole)
        else:
            self.schedule.step()


def stream(num: int, between: Callable[[Lead], None] | None = None) -> Callable[[Lead], None]:
    """`num` micro-steps, and something between each eight."""

    def drive(lead: Lead) -> None:
        for k in range(num):
            if between is not None and k and k % 8 == 0:
                between(lead)
            lead.run(MICRO_STEP)

    return drive


def compare(bench: Bench, kind: str) -> str:
    """One line of the first table."""
    bench.ours(stream(NUM_MICRO_STEPS))
    bench.torchs()
    before_s = bench.busy_s()
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(bench.ours(stream(NUM_MICRO_STEPS)))
        theirs.append(bench.torchs())
    busy_s = (bench.busy_s() - before_s) / ROUNDS
    bound = NUM_MICRO_STEPS / (NUM_MICRO_STEPS + bench.num_stages - 1)
    reached = [busy_s / statistics.median(times) for times in (ours, theirs)]
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    cells = [kind, str(bench.num_stages), f"{bound:.3f}", f"{reached[0]:.3f}"]
    cells += [f"{reached[0] / bound:.2f}", f"{reached[1]:.3f}", f"{ratio:.2f}"]
    return row(cells)


def cost(bench: Bench, betweens: list[Callable[[Lead], None]]) -> list[float]:
    """What each adds to a stream for each time, in micro-steps (3 FORWARD_S)."""
    num, rounds = 25, 3
    taken: list[list[float]] = [[] for _ in betweens]
    for _ in range(rounds):
        plain_s = bench.ours(stream(num))
        for times, between in zip(taken, betweens, strict=True):
            extra_s = bench.ours(stream(num, between)) - plain_s
            times.append(extra_s / (3 * FORWARD_S) / ((num - 1) // 8))
    return [statistics.median(times) for times in taken]


def pause_line(bench: Bench) -> str:
    (pair,) = cost(bench, [lambda lead: lead.pause()])
    num = 200

    def only_pauses(lead: Lead) -> None:
        for _ in range(num):
            lead.pause()

    idle_ms = statistics.median(bench.ours(only_pauses) for _ in range(3)) / num * 1e3
    return row([str(bench.num_stages), f"{pair:.2f}", f"{idle_ms:.1f} ms"])


def gap(length: int, act: Callable[[Lead], object]) -> Callable[[Lead], None]:
    """No data for the time of `length` micro-steps."""

    def between(lead: Lead) -> None:
        until_s = time.perf_counter() + length * 3 * FORWARD_S
        act(lead)
        time.sleep(max(0.0, until_s - time.perf_counter()))

    return between


def gap_line(bench: Bench, length: int) -> str:
    acts: list[Callable[[Lead], object]] = [lambda lead: None, Lead.finish_one, Lead.pause]
    costs = cost(bench, [gap(length, act) for act in acts])
    return row([str(bench.num_stages), str(length), *(f"{one:.2f}" for one in costs)])


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def run_cases(stage: int, address: str) -> list[str]:
    """Every process calls this; the lines of stage 0 are the report."""
    groups = {num: dist.new_group(list(range(num))) for num in (2, NUM_PROCESSES)}
    first = [row(["stages", "P", "bound", "reached", "of it", "torch", "time, ours / torch"])]
    first.append("|" + "---|" * 7)
    pauses = ["", row(["P", "a pause and its resuming, in micro-steps", "with nothing in flight"])]
    pauses.append("|---|---|---|")
    gaps = ["", row(["P", "no data for, in micro-steps", "stand still", "BACK", "PAUSE"])]
    gaps.append("|" + "---|" * 5)
    for kind, num_stages in (("layers", 2), ("sleeps", 2), ("sleeps", NUM_PROCESSES)):
        if stage < num_stages:
            name = f"{kind}{num_stages}"
            link = open_link(address, name=name, stage=stage, num_stages=num_stages)
            module = stack() if kind == "layers" else Sleeper()
            bench = Bench(stage, num_stages, module, link, groups[num_stages])
            first.append(compare(bench, kind))
            if kind == "sleeps":
                pauses.append(pause_line(bench))
            if num_stages > 2:
                gaps += [gap_line(bench, length) for length in (1, 2, 4)]
        dist.barrier()
    return first + pauses + gaps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--store", default="")
    told = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(told.stage)
    children = []
    if told.stage == 0:
        store = GroupStore()
        told.store = store.address
        command = [sys.executable, __file__, "--store", told.store, "--stage"]
        children = [subprocess.Popen([*command, str(k)]) for k in range(1, NUM_PROCESSES)]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = dist.PrefixStore("world", store_at(told.store))
    dist.init_process_group("gloo", store=world, rank=told.stage, world_size=NUM_PROCESSES)
    lines = run_cases(told.stage, told.store)
    if told.stage == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
