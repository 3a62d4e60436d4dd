"""The step stream as a fluid: rates, admission, death, drops, the update."""

from collections.abc import Callable

import pytest

from opengyre.control.commands import CloseStep
from opengyre.control.facts import Fact, GroupAssigned, GroupReturned, StepCommitted
from opengyre.control.ids import CommandId, GroupId
from opengyre.simulate.costs import TrainingCosts
from opengyre.simulate.kernel import Kernel
from opengyre.simulate.stream import Stream, StreamParts


class Desk:
    """A stream, its clock, and what it told: (time, what)."""

    def __init__(self, *, weigh: Callable[[GroupId], float] = lambda group: 1.0, **costs) -> None:
        self.kernel = Kernel()
        self.told: list[tuple[float, str]] = []
        self.devices: list[tuple[float, int]] = []
        defaults = {"group_device_s": 400.0, "efficiency": 0.5, "optimizer_s": 10.0}
        self.stream = Stream(
            StreamParts(
                kernel=self.kernel,
                costs=TrainingCosts(**{**defaults, **costs}),
                max_groups=8,
                tell=self._tell,
                weigh=weigh,
                work_on=lambda devices: self.devices.append((self.kernel.now_s, devices)),
                committed=lambda step, version, groups: None,
            )
        )

    def _tell(self, fact: Fact) -> None:
        names = {GroupAssigned: "+", GroupReturned: "-"}
        if isinstance(fact, GroupAssigned | GroupReturned):
            self.told.append((self.kernel.now_s, names[type(fact)] + fact.group))
        elif isinstance(fact, StepCommitted):
            self.told.append((self.kernel.now_s, f"version {fact.version}"))

    def open(self, *groups: str, devices: int = 4) -> None:
        """4 devices work on one group for 100 s."""
        self.stream.open(1, 0, devices)
        self.offer(*groups)

    def offer(self, *groups: str) -> None:
        self.stream.offer(1, tuple(map(GroupId, groups)))

    def close(self, num_groups: int) -> None:
        command = CloseStep(command_id=CommandId(1), reason="full", step=1, num_groups=num_groups)
        self.stream.close(command)

    def run_to(self, time_s: float) -> None:
        while self.kernel.next_s is not None and self.kernel.next_s <= time_s:
            self.kernel.run_next()
        self.kernel.pass_to(time_s)


def test_groups_are_assigned_one_after_another_and_the_update_follows_the_last() -> None:
    desk = Desk()
    desk.open("a", "b")
    desk.run_to(150.0)
    desk.close(2)
    desk.run_to(1000.0)
    assert desk.told == [(0.0, "+a"), (100.0, "+b"), (210.0, "version 1")]


def test_a_satellite_raises_the_rate_from_its_admission() -> None:
    desk = Desk()
    desk.open("a", "b")
    desk.run_to(50.0)
    assert desk.stream.admit(1, 1, 4)
    desk.run_to(1000.0)
    assert desk.told[1][0] == pytest.approx(50.0 + 50.0 / 1.5)
    assert desk.devices[-2:] == [(desk.told[1][0], 8), (pytest.approx(150.0), 0)]


def test_the_core_reduces_only_with_others() -> None:
    alone, with_one = Desk(reduce_s=7.0), Desk(reduce_s=7.0, efficiency=1.0)
    for desk in (alone, with_one):
        desk.open("a")
    with_one.stream.admit(1, 1, 4)
    for desk in (alone, with_one):
        desk.close(1)
        desk.run_to(1000.0)
    assert alone.told[-1] == (110.0, "version 1")
    assert with_one.told[-1] == (67.0, "version 1")


def test_each_start_after_a_pause_costs_a_bubble() -> None:
    desk = Desk(bubble_s=5.0)
    desk.open("a", "b")
    desk.run_to(300.0)
    desk.offer("c")
    desk.run_to(350.0)
    desk.close(3)
    desk.run_to(1000.0)
    assert desk.told == [(0.0, "+a"), (105.0, "+b"), (300.0, "+c"), (415.0, "version 1")]


def test_a_longer_group_is_more_work() -> None:
    desk = Desk(weigh=lambda group: 3.0 if group == "a" else 1.0)
    desk.open("a", "b")
    desk.run_to(350.0)
    assert desk.told == [(0.0, "+a"), (300.0, "+b")]


def test_the_work_of_a_dead_satellite_comes_back_with_the_groups_it_fills() -> None:
    desk = Desk(efficiency=1.0)
    desk.open("a", "b", "c", "d", "e")
    desk.stream.admit(1, 1, 4)
    desk.run_to(175.0)
    assert [what for _, what in desk.told] == ["+a", "+b", "+c", "+d"]
    desk.stream.lose(1)
    desk.run_to(185.0)
    desk.stream.drop(1, 1)
    assert desk.told[4:] == [(185.0, "-d"), (185.0, "-c")]
    assert desk.stream.redone_groups == pytest.approx(1.75)
    desk.run_to(1000.0)
    assert desk.told[6:] == [(200.0, "+c"), (300.0, "+d"), (400.0, "+e")]


def test_a_closing_step_keeps_its_groups_when_a_member_is_dropped() -> None:
    desk = Desk(efficiency=1.0)
    desk.open("a", "b")
    desk.stream.admit(1, 1, 4)
    desk.run_to(75.0)
    desk.close(2)
    desk.stream.lose(1)
    desk.stream.drop(1, 1)
    desk.run_to(1000.0)
    assert desk.told == [(0.0, "+a"), (50.0, "+b"), (75.0 + 125.0 + 10.0, "version 1")]


def test_a_drop_during_the_update_begins_it_anew() -> None:
    desk = Desk(efficiency=1.0, reduce_s=20.0)
    desk.open("a")
    desk.stream.admit(1, 1, 4)
    desk.close(1)
    desk.run_to(60.0)
    desk.stream.drop(1, 1)
    desk.run_to(1000.0)
    assert desk.told == [(0.0, "+a"), (60.0 + 50.0 + 10.0, "version 1")]


def test_a_step_without_groups_makes_no_version() -> None:
    desk = Desk()
    desk.open()
    desk.close(0)
    desk.run_to(100.0)
    assert desk.told == [(10.0, "version 0")]


def test_without_the_core_the_step_is_gone_and_may_be_opened_again() -> None:
    desk = Desk()
    desk.open("a", "b")
    desk.run_to(150.0)
    desk.stream.lose(0)
    desk.run_to(500.0)
    assert desk.stream.redone_groups == pytest.approx(1.5)
    assert not desk.stream.admit(1, 1, 4)
    desk.open("a")
    desk.close(1)
    desk.run_to(1000.0)
    assert desk.told[2:] == [(500.0, "+a"), (610.0, "version 1")]


def test_nobody_joins_a_step_that_closes_or_that_dropped_him() -> None:
    desk = Desk()
    desk.open("a")
    desk.stream.drop(1, 2)
    assert not desk.stream.admit(1, 2, 4)
    desk.close(1)
    assert not desk.stream.admit(1, 3, 4)
    assert not desk.stream.admit(2, 1, 4)
