"""The pipeline executor between real processes: order, exactness, bounds, deaths, times."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import pytest
from pipeline_rig import Pipe, Rig, micro_step
from pipeline_toy import Report, ToyPart, packed

from opengyre.seams.cells import MicroStep
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.pipeline.lead import Lead
from opengyre.trainer.pipeline.parts import Finished

NUM_MICRO_STEPS = 150


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    one = Rig(num_spares=4)
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


def plain_loop(rows: list[MicroStep], has_reference: bool) -> tuple[dict[str, str], list[Finished]]:
    """One part with all layers, no executor."""
    part = ToyPart(0, 1, has_reference)
    finished = []
    for row in rows:
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
    rows, gaps = random_rows(3 + has_reference)
    pipe = rig.open(num_stages, num_serves=gaps.count("drain") + 1, has_reference=has_reference)
    finished = drive(pipe.lead, rows, gaps)
    sums, expected = plain_loop(rows, has_reference)
    assert finished == expected
    assert sums_of(pipe.reports()) == sums
