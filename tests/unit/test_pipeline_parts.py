"""The parts of the pipeline executor that need no second process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opengyre.seams.cells import MicroStep, StageTimes
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.pipeline.header import Command, Header, decode, encode
from opengyre.trainer.pipeline.lead import Lead
from opengyre.trainer.pipeline.parts import Finished, Passed, Told
from opengyre.trainer.pipeline.stage_clock import Account, StageClock

COUNTS = st.integers(min_value=0, max_value=2**62)


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Slow:
    """A part that takes its time: 2 s forward, 3 s backward."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock
        self.order: list[str] = []

    def forward(self, micro_step: MicroStep, received: Tensor | None) -> Passed:
        self._clock.now_s += 2
        self.order.append(f"forward {micro_step.number}")
        return Passed(sent=None, told=Told(loss_sum=0.5), graph=micro_step.number)

    def backward(self, passed: Passed, gradient: Tensor | None) -> Tensor | None:
        self._clock.now_s += 3
        self.order.append(f"backward {passed.graph}")
        return None


def micro_step(number: int) -> MicroStep:
    return MicroStep(
        step=1,
        number=number,
        version=0,
        token_ids=[],
        position_ids=[],
        logprobs=[],
        segments=[],
        paths=[],
    )


@given(
    command=st.sampled_from(Command),
    numbers=st.tuples(*[COUNTS] * 6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_a_header_comes_out_as_it_went_in(
    command: Command, numbers: tuple[int, ...], dtype: torch.dtype
) -> None:
    count, finished, num_aux_bytes, *shape = numbers
    header = Header(
        command=command,
        count=count,
        finished=finished,
        num_aux_bytes=num_aux_bytes,
        shape=(shape[0], shape[1], shape[2]),
        dtype=dtype,
    )
    fields = encode(header)
    assert (fields.shape, fields.dtype) == ((8,), torch.int64)
    assert decode(fields) == header


@pytest.mark.parametrize("fields", [[0] * 8, [6, *[0] * 7], [1, *[0] * 6, 4], [1, *[0] * 6, -1]])
def test_a_header_that_makes_no_sense_is_refused(fields: list[int]) -> None:
    with pytest.raises(BoundaryError, match="pipeline: header"):
        decode(torch.tensor(fields))


def test_the_accounts_of_a_stage_add_up_to_the_time_since_its_start() -> None:
    clock = HandClock()
    times = StageClock(clock)
    clock.now_s += 1
    times.enter(Account.FORWARD)
    clock.now_s += 2
    times.idle(1)
    clock.now_s += 4
    times.enter(Account.BACKWARD)
    clock.now_s += 8
    times.idle(0)
    clock.now_s += 16
    assert times.times == StageTimes(forward_s=2, backward_s=8, bubble_s=4, waiting_s=17)


def test_one_stage_finishes_each_micro_step_as_it_runs() -> None:
    clock = HandClock()
    part = Slow(clock)
    lead = Lead(part, link=None, num_stages=1, now_s=clock)
    for number in (4, 7):
        assert lead.run(micro_step(number)) == [Finished(number=number, told=Told(loss_sum=0.5))]
    assert lead.num_in_flight == 0
    assert lead.finish_one() == lead.pause() == lead.drain() == []
    clock.now_s += 1
    assert part.order == ["forward 4", "backward 4", "forward 7", "backward 7"]
    assert lead.times == StageTimes(forward_s=4, backward_s=6, waiting_s=1)
