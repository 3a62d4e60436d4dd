"""One stage of the continuous 1F1B pipeline: what lead and followers have in common.

Owns: the micro-steps in flight on this stage, their order, when a backward is due, the stage's
clock. Must not know: where micro-steps come from, what the part computes.
Invariants: stage s of P has at most P - s micro-steps in flight; backwards run in the order of the
forwards; a stage has finished at least what the stage before it has, so a wait for a gradient
never needs another command.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep
from opengyre.trainer.pipeline.header import Command
from opengyre.trainer.pipeline.link import Link
from opengyre.trainer.pipeline.parts import Finished, Passed, StagePart, Told
from opengyre.trainer.pipeline.stage_clock import Account, StageClock


@dataclass(frozen=True, slots=True)
class _InFlight:
    number: int
    passed: Passed


class Station:
    """`link` is None when the pipeline has one stage."""

    def __init__(
        self,
        part: StagePart,
        *,
        link: Link | None,
        stage: int,
        num_stages: int,
        now_s: Callable[[], float],
    ) -> None:
        self._part = part
        self._before = link if stage > 0 else None
        self._after = link if stage < num_stages - 1 else None
        self._depth = num_stages - stage
        self._in_flight: deque[_InFlight] = deque()
        self.num_run = 0
        self.num_finished = 0
        self.clock = StageClock(now_s)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def run(self, micro_step: MicroStep, received: Tensor | None, aux: Tensor) -> list[Finished]:
        """Forward, send on; then the backward that is due, if as many as may be are in flight."""
        self.clock.enter(Account.FORWARD)
        passed = self._part.forward(micro_step, received)
        self.num_run += 1
        if self._after is not None:
            if passed.sent is None:
                raise InvariantError(f"micro-step {micro_step.number} has nothing to send on")
            self._after.send_run(
                passed.sent, aux=aux, count=self.num_run, finished=self.num_finished
            )
        self._in_flight.append(_InFlight(micro_step.number, passed))
        self.clock.idle(self.num_in_flight)
        return self._finish_until(self.num_run - self._depth + 1)

    def back(self, count: int) -> list[Finished]:
        """Backwards until `count` micro-steps are finished, here and on the stages after."""
        if count > self.num_finished and self._after is not None:
            self._after.send_command(
                Command.BACK,
                count=count,
                finished=self.num_finished,
                num_run=self.num_run,
            )
        return self._finish_until(count)

    def rest(self, command: Command) -> list[Finished]:
        """Finish all, see the stages after come to rest, tell the stage before."""
        if self._after is not None:
            self._after.send_command(
                command,
                count=self.num_run,
                finished=self.num_finished,
                num_run=self.num_run,
            )
        finished = self._finish_until(self.num_run)
        if self._after is not None:
            self._after.await_rest()
        if self._before is not None:
            self._before.send_rest(count=self.num_run)
        return finished

    def _finish_until(self, count: int) -> list[Finished]:
        return [self._finish_oldest() for _ in range(self.num_finished, count)]

    def _finish_oldest(self) -> Finished:
        one = self._in_flight.popleft()
        gradient, told = None, one.passed.told
        if self._after is not None:
            gradient, told = self._after.receive_gradient(count=self.num_finished + 1)
        told = told or Told()
        self.clock.enter(Account.BACKWARD)
        upstream = self._part.backward(one.passed, gradient)
        self.num_finished += 1
        if self._before is not None:
            if upstream is None:
                raise InvariantError(f"micro-step {one.number} has no gradient to send back")
            self._before.send_gradient(upstream, told, count=self.num_finished)
        self.clock.idle(self.num_in_flight)
        return Finished(number=one.number, told=told)
