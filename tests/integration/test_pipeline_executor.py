"""The pipeline executor between real processes: order, exactness, bounds, deaths, times."""

import functools
import itertools
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager

import msgspec
import pytest
from pipeline_rig import Pipe, Rig, micro_step
from pipeline_toy import HIDDEN, LIVE_AT, Report, ToyPart, packed

from opengyre.seams.cells import MicroStep
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.pipeline.lead import Lead
from opengyre.trainer.pipeline.parts import Finished

NUM_MICRO_STEPS = 150
SEEN_S = 20
"""In which a death is seen, on a busy machine; a quiet one takes 50 ms."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    one = Rig(num_spares=3)
    yield one
    one.end()


def random_rows(seed: int) -> tuple[list[MicroStep], list[str]]:
    """Micro-steps of random lengths, and what happens after each."""
    rng = random.Random(seed)
    rows = [micro_step(number, rng) for number in range(NUM_MICRO_STEPS)]
    kinds = rng.choices(("", "gap", "gaps", "pause", "drain"), (50, 15, 10, 20, 5), k=len(rows))
    return rows, kinds


def drive(lead: Lead, rows: list[MicroStep], gaps: list[str]) -> list[Finished]:
    finished: list[Finished] = []
    for row, gap in zip(rows, gaps, strict=True):
        finished += lead.run(row)
        if gap.startswith("gap"):
            finished += lead.finish_one()
        if gap == "gaps":
            finished += lead.finish_one()
        if gap == "pause":
            finished += lead.pause()
            assert lead.num_in_flight == 0
        if gap == "drain":
            finished += lead.drain()
    return finished + lead.drain()


@contextmanager
def running(pipe: Pipe) -> Iterator[Future[None]]:
    """The lead runs micro-steps in a thread until it fails."""

    def run_on() -> None:
        rng = random.Random(0)
        for number in itertools.count():
            pipe.lead.run(micro_step(number, rng))

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_on)
    pipe.close()


@functools.cache
def plain_loop(seed: int, has_reference: bool) -> tuple[dict[str, str], list[Finished]]:
    """One part with all layers, no executor."""
    part = ToyPart(0, 1, has_reference)
    finished = []
    for row in random_rows(seed)[0]:
        passed = part.forward(row, None)
        part.backward(passed, None)
        assert passed.told is not None
        finished.append(Finished(number=row.number, told=passed.told))
    return packed(part.sums), finished


def sums_of(reports: list[Report]) -> dict[str, str]:
    assert [one.error for one in reports] == [""] * len(reports)
    return {name: told for one in reports for name, told in one.sums.items()}


@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_gradients_are_bit_equal_to_a_plain_loop(
    rig: Rig, num_stages: int, has_reference: bool
) -> None:
    seed = 3 + has_reference
    rows, gaps = random_rows(seed)
    pipe = rig.open(num_stages, num_serves=gaps.count("drain") + 1, has_reference=has_reference)
    finished = drive(pipe.lead, rows, gaps)
    sums, expected = plain_loop(seed, has_reference)
    assert finished == expected
    assert sums_of(pipe.reports()) == sums


def test_what_a_stage_holds_does_not_grow_with_the_number_of_micro_steps(rig: Rig) -> None:
    rng, num_stages = random.Random(1), 4
    pipe = rig.open(num_stages)
    numbers = range(LIVE_AT[0] - 20, LIVE_AT[1] + 1)
    rows = [micro_step(number, rng, num_tokens=1000) for number in numbers]
    drive(pipe.lead, rows, [""] * len(rows))
    for stage, one in enumerate(pipe.reports()):
        early, late = (one.live[number] for number in LIVE_AT)
        assert one.most_in_flight == num_stages - stage
        assert early.num_graphs == num_stages - stage - 1
        assert late == msgspec.structs.replace(early, resident_bytes=late.resident_bytes)
        assert early.num_held <= 2 * (num_stages - stage)
        activations_bytes = 1000 * HIDDEN * 8 * len(rows)
        assert late.resident_bytes - early.resident_bytes < activations_bytes / 3


def test_times_add_up_and_tell_a_bubble_from_a_wait_for_data(rig: Rig) -> None:
    rng = random.Random(2)
    pipe = rig.open(2)
    for number in range(20):
        pipe.lead.run(micro_step(number, rng))
    time.sleep(0.3)
    pipe.lead.pause()
    time.sleep(0.5)
    pipe.lead.drain()
    lead, follower = pipe.reports()
    assert lead.times.bubble_s > 0.3
    assert lead.times.waiting_s > 0.5
    assert follower.times.waiting_s > 0.8, "the last stage never has anything in flight"
    for one in (lead, follower):
        assert one.times.forward_s > 0
        assert one.times.backward_s > 0
        least_s, most_s = one.lived_s
        assert least_s - 1e-9 <= sum(msgspec.structs.astuple(one.times)) <= most_s + 1e-9


def test_the_lead_sees_at_once_that_a_stage_was_killed_in_its_forward(rig: Rig) -> None:
    pipe = rig.open(2, is_mortal=True, trap=("forward", 5))
    with running(pipe) as outcome:
        assert pipe.processes[-1].line() == "trapped\n"
        pipe.processes[-1].strike(signal.SIGKILL)
        with pytest.raises(BoundaryError, match="stage 0 lost stage 1"):
            outcome.result(timeout=SEEN_S)


def test_a_stopped_stage_blocks_the_lead_until_it_is_killed(rig: Rig) -> None:
    pipe = rig.open(2, is_mortal=True)
    with running(pipe) as outcome:
        time.sleep(0.3)
        pipe.processes[-1].strike(signal.SIGSTOP)
        with pytest.raises(NotYet):
            outcome.result(timeout=1)
        pipe.processes[-1].strike(signal.SIGKILL)
        with pytest.raises(BoundaryError, match="stage 0 lost stage 1"):
            outcome.result(timeout=SEEN_S)


def test_a_death_in_the_last_stages_backward_reaches_the_lead_through_the_middle(rig: Rig) -> None:
    pipe = rig.open(3, is_mortal=True, trap=("backward", 5))
    with running(pipe) as outcome:
        assert pipe.processes[-1].line() == "trapped\n"
        pipe.processes[-1].strike(signal.SIGKILL)
        assert "stage 1 lost stage 2" in pipe.processes[0].report().error
        with pytest.raises(BoundaryError, match="stage 0 lost stage 1"):
            outcome.result(timeout=SEEN_S)


def test_a_follower_sees_that_the_lead_is_gone(rig: Rig) -> None:
    pipe = rig.open(2)
    pipe.lead.run(micro_step(0, random.Random(0)))
    pipe.close()
    assert "stage 1 lost stage 0" in pipe.processes[0].report().error
