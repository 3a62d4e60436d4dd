"""A later stage of a cell's pipeline: does what the headers from the stage before say.

Owns: the loop. Must not know: who drives the pipeline and why.
Invariant: between commands it sits in one blocking receive.
"""

import time
from collections.abc import Callable
from typing import assert_never

import msgspec

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep, StageTimes
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.pipeline.header import Command, Header
from opengyre.trainer.pipeline.link import Link
from opengyre.trainer.pipeline.parts import StagePart
from opengyre.trainer.pipeline.station import Station

_DECODER = msgspec.msgpack.Decoder(MicroStep)


class Follower:
    def __init__(
        self,
        part: StagePart,
        *,
        link: Link,
        stage: int,
        num_stages: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < stage < num_stages:
            raise InvariantError(f"stage {stage} of {num_stages} follows no other")
        self._link = link
        self._station = Station(part, link=link, stage=stage, num_stages=num_stages, now_s=now_s)

    @property
    def times(self) -> StageTimes:
        """Since the executor's start; what passes between two `serve` counts as waiting."""
        return self._station.clock.times

    def serve(self) -> None:
        """Until DRAIN. Raises BoundaryError("pipeline") when a neighbour is gone."""
        while True:
            header = self._link.receive_header()
            match header.command:
                case Command.RUN:
                    self._run(header)
                case Command.BACK:
                    self._station.back(header.count)
                case Command.PAUSE:
                    self._station.rest(Command.PAUSE)
                case Command.DRAIN:
                    self._station.rest(Command.DRAIN)
                    return
                case Command.AT_REST:
                    raise BoundaryError("pipeline", "at rest, from above", retryable=False)
                case other:
                    assert_never(other)

    def _run(self, header: Header) -> None:
        if header.count != self._station.num_run + 1:
            words = f"micro-step {header.count} came after {self._station.num_run}"
            raise BoundaryError("pipeline", words, retryable=False)
        aux, received = self._link.receive_run(header)
        micro_step = _DECODER.decode(aux.numpy().data)
        self._station.run(micro_step, received, aux)
