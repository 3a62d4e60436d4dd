"""Reductions in whole seeded runs: who dies, hangs or is late at which word, and what it costs."""

from dataclasses import replace

from opengyre.control.facts import EngineLost
from opengyre.store.observations import MemberJoined, StepReport
from opengyre.trainer.group_limits import DEFAULT
from tests.sim.seeded_faults import Fate, Fault, Harm
from tests.sim.seeded_loop import Mode
from tests.sim.seeded_world import SeededWorld

SEED = 4
VICTIM = "c1"
HUNG_S = 1000.0
JOIN_DEADLINE_S = 10.0


class Story:
    """A run in which all is well but one harm at the first `event` about the victim."""

    def __init__(self, event: str, harm: Harm | None, *, lasts_s: float = 0.0) -> None:
        self.world = SeededWorld(seed=SEED, mode=Mode.SHUFFLE)
        self.world.shape = replace(self.world.shape, may_group=True)
        if harm is not None:
            self._plan(event, harm, lasts_s)

    def play(self) -> list[StepReport]:
        end = self.world.run()
        assert end is not None
        assert end.exit_code == 0
        return [one for one in self._values() if isinstance(one, StepReport)]

    def deaths(self) -> list[str]:
        return [str(one.engine) for one in self._values() if isinstance(one, EngineLost)]

    def joined(self) -> list[MemberJoined]:
        return [one for one in self._values() if isinstance(one, MemberJoined)]

    def _values(self) -> list[object]:
        return [row.value for row in self.world.checks.rows]

    def _plan(self, event: str, harm: Harm, lasts_s: float) -> None:
        fault = Fault(
            event=event,
            about=VICTIM,
            number=1,
            harm=harm,
            engine=VICTIM,
            lasts_s=lasts_s,
            delay_s=0.0,
        )
        engines = tuple(str(spec.engine) for spec in self.world.shape.scheduler().engines)
        self.world.fate = Fate(self.world.loop, (fault,), engines)
        self.world.loop.on_kill = self.world.fate.see_kill


def tried(reports: list[StepReport]) -> list[StepReport]:
    return [one for one in reports if one.num_reduce_tries > 1]


def test_undisturbed_cells_reduce_together_at_the_first_try() -> None:
    story = Story("", None)
    reports = story.play()
    assert "group" in {one.reduced_by for one in reports}
    assert {one.reduced_by for one in reports} <= {"group", "alone"}
    assert tried(reports) == []
    assert all(one.reduce_s is not None and one.reduce_s < 1.0 for one in reports)


def test_a_member_killed_as_it_reduces_costs_one_more_try() -> None:
    story = Story("ReduceTogether", Harm.KILL)
    (late,) = tried(story.play())
    assert late.num_reduce_tries == 2
    assert story.deaths() == [VICTIM]
    assert VICTIM not in late.stages


def test_a_member_that_hangs_before_it_settles_is_ended_and_the_step_goes_on() -> None:
    story = Story("Settle", Harm.STOP, lasts_s=HUNG_S)
    (late,) = tried(story.play())
    assert story.deaths() == [VICTIM]
    assert late.reduce_s is not None
    assert DEFAULT.settle_s <= late.reduce_s < DEFAULT.settle_s + 10.0


def test_a_member_that_hangs_in_the_reduce_is_ended_and_the_step_goes_on() -> None:
    story = Story("ReduceTogether", Harm.STOP, lasts_s=HUNG_S)
    (late,) = tried(story.play())
    assert story.deaths() == [VICTIM]
    assert late.reduce_s is not None
    assert DEFAULT.late_s <= late.reduce_s < DEFAULT.late_s + 10.0


def test_a_member_that_settles_late_but_in_time_stays() -> None:
    story = Story("Settle", Harm.STOP, lasts_s=DEFAULT.settle_s / 2)
    assert tried(story.play()) == []
    assert story.deaths() == []


def test_groups_that_fail_and_lose_nobody_end_in_the_star() -> None:
    story = Story("", None)
    story.world.member_of_group = lambda life: None  # type: ignore[method-assign]
    reports = story.play()
    assert {(one.reduced_by, one.num_reduce_tries) for one in reports} == {("star", 3)}
    assert story.deaths() == []


def test_a_cell_that_hangs_while_it_joins_is_waited_for_to_its_deadline_and_then_dropped() -> None:
    undisturbed = Story("", None)
    undisturbed.play()
    joined = [one.step for one in undisturbed.joined() if f"c{one.cell}" == VICTIM]
    story = Story("JoinStep", Harm.STOP, lasts_s=HUNG_S)
    reports = story.play()
    (step,) = [one for one in reports if one.step == joined[0]]
    assert VICTIM not in step.stages
    assert step.closed_s - step.opened_s < 3 * JOIN_DEADLINE_S
