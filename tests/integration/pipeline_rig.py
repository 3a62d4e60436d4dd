"""Pipelines of the toy model: stage 0 in this process, the others in spawned ones."""

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import torch
from pipeline_toy import VOCABULARY, Lifetime, Report, Served, ToyPart

from opengyre.seams.cells import MicroStep
from opengyre.trainer.pipeline.lead import Lead
from opengyre.trainer.pipeline.link import open_link
from opengyre.trainer.prefix_groups import GroupStore

TOY = Path(__file__).with_name("pipeline_toy.py")
NO_TRAP = ("", -1)


class Process:
    """Serves one stage after another."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(TOY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, served: Served) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(served).decode() + "\n")
        self._child.stdin.flush()

    def line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()

    def report(self) -> Report:
        return msgspec.json.decode(self.line(), type=Report)

    def strike(self, signal_number: int) -> None:
        os.kill(self._child.pid, signal_number)

    def end(self) -> None:
        self._child.kill()
        self._child.communicate()


class Pipe:
    """One open pipeline."""

    def __init__(self, part: ToyPart, num_stages: int, processes: list[Process]) -> None:
        self._life = Lifetime(lambda: Lead(part, link=part.link, num_stages=num_stages))
        self._part = part
        self.lead: Lead = self._life.executor
        self.processes = processes

    def reports(self) -> list[Report]:
        """Of all stages, after the last drain; closes the link."""
        reports = [self._life.report(self._part), *(one.report() for one in self.processes)]
        self.close()
        return reports

    def close(self) -> None:
        if self._part.link is not None:
            self._part.link.close()


class Rig:
    """A store, three processes for every test, and some that may die."""

    def __init__(self, num_spares: int) -> None:
        torch.set_num_threads(1)
        self._store = GroupStore()
        self._shared = [Process() for _ in range(3)]
        self._spares = [Process() for _ in range(num_spares)]
        self._struck: list[Process] = []
        self._num_pipes = 0

    def open(
        self,
        num_stages: int,
        *,
        num_serves: int = 1,
        has_reference: bool = False,
        is_mortal: bool = False,
        trap: tuple[str, int] = NO_TRAP,
    ) -> Pipe:
        """If it is mortal, the last stage is a spare process, which stands still in the trap."""
        self._num_pipes += 1
        name = f"pipe{self._num_pipes}"
        processes = self._shared[: num_stages - 1]
        if is_mortal:
            self._struck.append(self._spares.pop())
            processes = [*processes[:-1], self._struck[-1]]
        for stage, process in enumerate(processes, start=1):
            process.tell(
                Served(
                    store=self._store.address,
                    name=name,
                    stage=stage,
                    num_stages=num_stages,
                    num_serves=num_serves,
                    has_reference=has_reference,
                    trap=trap if stage == num_stages - 1 else NO_TRAP,
                )
            )
        part = ToyPart(0, num_stages, has_reference)
        if num_stages > 1:
            part.link = open_link(self._store.address, name=name, stage=0, num_stages=num_stages)
        return Pipe(part, num_stages, processes)

    def end(self) -> None:
        for one in (*self._shared, *self._spares, *self._struck):
            one.end()
        self._store.close()


def micro_step(number: int, rng: random.Random, num_tokens: int = 0) -> MicroStep:
    """Of a random length unless it is given."""
    length = num_tokens or rng.randint(1, 40)
    return MicroStep(
        step=1,
        number=number,
        version=0,
        token_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
        position_ids=list(range(length)),
        logprobs=[rng.uniform(-1, 1) for _ in range(length)],
        segments=[],
        paths=[],
    )
