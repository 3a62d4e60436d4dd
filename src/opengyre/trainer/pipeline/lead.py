"""Stage 0 of a cell's pipeline: what the rest of the cell drives.

Owns: the commands. Must not know: the stream, the step, the other stages' processes.
Invariants: a micro-step counts when stage 0 finished its backward, and only then; after `pause`
every stage is at one boundary and nothing is in flight. Synchronous: used in one thread.
"""

import time
from collections.abc import Callable

import msgspec
import torch

from opengyre.seams.cells import MicroStep, StageTimes
from opengyre.trainer.pipeline.header import Command
from opengyre.trainer.pipeline.link import Link
from opengyre.trainer.pipeline.parts import Finished, StagePart
from opengyre.trainer.pipeline.station import Station

_ENCODER = msgspec.msgpack.Encoder()


class Lead:
    """Every method may raise BoundaryError("pipeline"); the pipeline is then of no more use."""

    def __init__(
        self,
        part: StagePart,
        *,
        link: Link | None,
        num_stages: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._station = Station(part, link=link, stage=0, num_stages=num_stages, now_s=now_s)

    @property
    def num_in_flight(self) -> int:
        return self._station.num_in_flight

    @property
    def times(self) -> StageTimes:
        """Since the executor's start."""
        return self._station.clock.times

    def run(self, micro_step: MicroStep) -> list[Finished]:
        """Start it. Returns what finished meanwhile: the oldest, once P are in flight."""
        aux = torch.frombuffer(bytearray(_ENCODER.encode(micro_step)), dtype=torch.uint8)
        return self._station.run(micro_step, None, aux)

    def finish_one(self) -> list[Finished]:
        """The oldest runs to its end (no data for now); [] when nothing is in flight."""
        if not self.num_in_flight:
            return []
        return self._station.back(self._station.num_finished + 1)

    def pause(self) -> list[Finished]:
        """Finish all; every stage waits for the next command."""
        return self._station.rest(Command.PAUSE)

    def drain(self) -> list[Finished]:
        """`pause`, and the followers leave `serve`; they may come back to it."""
        return self._station.rest(Command.DRAIN)
