"""Steps over real processes and gloo groups: whoever dies or stops, the step ends exact."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from opengyre.seams.errors import BoundaryError
from opengyre.store.observations import StepReport
from tests.integration.reduce_rig import LIMITS, ReduceRig

RECOVERY_S = 4.0
START_S = 60.0
LATE_S = LIMITS.settle_s + LIMITS.late_s + RECOVERY_S


@dataclass(frozen=True, slots=True)
class Shared:
    """One set of processes for all tests of this module."""

    rig: ReduceRig
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    def step(self) -> StepReport:
        async def _step() -> StepReport:
            await self.rig.until_all_live()
            self.rig.deaths.clear()
            report = await self.rig.run_step()
            assert await self.rig.is_exact()
            return report

        report: StepReport = self.run(_step())
        return report


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        rig = ReduceRig(Path(tmp_path_factory.mktemp("reduce")))
        runner.run(rig.start())
        yield Shared(rig, runner.run)
        runner.run(rig.end())


def _num_open(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_steps_of_one_membership_reduce_in_one_group_that_is_made_once(shared: Shared) -> None:
    assert shared.step().reduced_by == "group"
    before = [_num_open(shared.rig.pid(cell)) for cell in range(3)]
    for _ in range(3):
        report = shared.step()
        assert (report.reduced_by, report.num_reduce_tries) == ("group", 1)
        assert sorted(report.stages) == ["c0", "c1", "c2"]
    assert [_num_open(shared.rig.pid(cell)) for cell in range(3)] == before


@pytest.mark.parametrize("place", ["settle", "before", "in", "after"])
def test_a_satellite_killed_around_the_reduce_costs_a_try_and_nothing_else(
    shared: Shared, place: str
) -> None:
    shared.rig.set_trap(2, place, "kill")
    report = shared.step()
    shared.run(shared.rig.until_dead(2))
    assert [one[:2] for one in shared.rig.deaths] == ["c2"]
    assert report.num_reduce_tries <= 3
    assert report.reduce_s is not None
    assert report.reduce_s < RECOVERY_S


@pytest.mark.parametrize("place", ["settle", "before", "after"])
def test_a_satellite_that_stops_is_found_and_ended_and_the_step_goes_on(
    shared: Shared, place: str
) -> None:
    shared.rig.set_trap(1, place, "stop")
    report = shared.step()
    shared.run(shared.rig.until_dead(1))
    assert [one[:2] for one in shared.rig.deaths] == ["c1"]
    assert report.reduce_s is not None
    assert report.reduce_s < LATE_S
    assert report.reduced_by == "group"


def test_a_membership_whose_group_fails_twice_uses_the_star_for_this_step(shared: Shared) -> None:
    shared.rig.set_trap(2, "before", "refuse")
    for _ in range(2):
        report = shared.step()
        assert (report.reduced_by, report.num_reduce_tries) == ("star", 3)
    assert shared.rig.deaths == []
    shared.rig.clear_traps()
    report = shared.step()
    assert (report.reduced_by, report.num_reduce_tries) == ("group", 1)


def test_a_satellite_that_dies_in_the_star_costs_a_try(shared: Shared) -> None:
    shared.rig.set_trap(1, "before", "refuse")
    shared.rig.set_trap(2, "share", "kill")
    report = shared.step()
    assert [one[:2] for one in shared.rig.deaths] == ["c2"]
    assert report.num_reduce_tries >= 4
    shared.rig.clear_traps()


def test_a_core_that_dies_in_the_reduce_ends_the_step_at_once(shared: Shared) -> None:
    shared.rig.set_trap(0, "in", "kill")
    started_s = time.monotonic()
    with pytest.raises(BoundaryError):
        shared.step()
    assert time.monotonic() - started_s < LATE_S + START_S
    assert [one[:2] for one in shared.rig.deaths] == ["c0"]
