"""What a watcher sees: few plain lines without a terminal, a steady picture on one."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from opengyre.control import commands as c
from opengyre.control.facts import CommandApplied
from opengyre.control.ids import CommandId, EngineId, execution_id, group_id
from opengyre.store import observations as seen
from opengyre.store.observations import Role
from opengyre.views.notes import notes_of
from opengyre.views.run_state import RunState
from opengyre.views.tables import step_cells
from opengyre.views.terminal import EngineLane, TerminalView, ViewState, plain_line
from opengyre.views.words import step_words

STATE = ViewState(
    wall_s=12.0,
    phase="running",
    burst=2,
    step=3,
    num_steps=16,
    policy_version=3,
    waterlevel=30,
    capacity=36,
    next_threshold=28,
    num_ready=4,
    num_needed=6,
    groups_per_step=8,
    last_reward=0.51234,
    last_eval=None,
    tokens_per_s=1234.0,
    num_continued=1,
    engines=(
        EngineLane(engine="s0", cell=None, role=Role.ROLLOUT, num_running=8, slots=12, version=2),
        EngineLane(engine="c1", cell=1, role=Role.LEAVING, num_running=0, slots=8, version=2),
        EngineLane(engine="c0", cell=0, role=Role.TRAINING, num_running=0, slots=8, version=3),
    ),
    waiting_for=("a verdict of g00012", "supply"),
)


def console(*, is_terminal: bool, width: int = 120) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    one = Console(file=output, force_terminal=is_terminal, width=width, legacy_windows=False)
    return one, output


def test_a_plain_line_names_everything_a_watcher_asks_for() -> None:
    line = plain_line(STATE)
    for words in (
        "burst 2",
        "step 3/16",
        "w 30 of C_R 36 (next cell leaves at 28)",
        "c0:training",
        "ready 4 of 6 needed",
        "reward 0.512",
        "1234 tokens/s",
        "waiting: a verdict of g00012",
    ):
        assert words in line
    assert "\n" not in line


def test_without_a_terminal_there_is_one_line_each_five_seconds_and_one_for_each_note() -> None:
    one, output = console(is_terminal=False)
    with TerminalView(one, is_live=False) as view:
        for tick in range(120):
            view.show(replace(STATE, wall_s=tick / 10))
        view.note(11.9, "cell 1 joined step 3 [mid-batch]")
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["0.0", "5.0", "10.0", "11.9"]
    assert lines[-1] == "   11.9 s  cell 1 joined step 3 [mid-batch]"


@pytest.mark.parametrize("width", [40, 100, 200])
def test_the_live_view_fits_the_terminal_and_shows_lanes_and_levels(width: int) -> None:
    one, output = console(is_terminal=False, width=width)
    view = TerminalView(one, is_live=False)
    one.print(view.render(STATE))
    lines = output.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert any("core c0" in line for line in lines)
    assert any("waterlevel" in line for line in lines)


def test_a_lane_remembers_the_roles_a_cell_had_by_the_second() -> None:
    one, output = console(is_terminal=False)
    view = TerminalView(one, is_live=False)
    for tick, role in enumerate([Role.ROLLOUT] * 3 + [Role.TRAINING] * 2):
        engines = (replace(STATE.engines[2], role=role),)
        for part in range(4):
            view.show(replace(STATE, wall_s=tick + part / 4, engines=engines))
    rows = [row for row in view.render(STATE).renderables if isinstance(row, Text)]
    (lane,) = [row for row in rows if row.plain.startswith("  core")]
    styles = [str(span.style) for span in lane.spans]
    assert styles == ["dodger_blue2"] * 3 + ["dark_orange"] * 2 + ["dark_orange"]
    assert output.getvalue().count("burst 2") == 1


def test_a_live_view_keeps_notes_and_leaves_nothing_behind_when_it_ends() -> None:
    one, output = console(is_terminal=True)
    with TerminalView(one, is_live=True) as view:
        view.note(1.0, "cell 1 joined")
        view.show(STATE)
        assert "cell 1 joined" in output.getvalue()
        assert "training" in output.getvalue()
    assert output.getvalue().endswith("\x1b[2K")


def test_a_run_with_no_capacity_no_groups_and_no_engines_can_be_drawn() -> None:
    one, _ = console(is_terminal=False)
    empty = replace(
        STATE,
        waterlevel=0,
        capacity=0,
        next_threshold=None,
        num_ready=0,
        num_needed=0,
        groups_per_step=0,
        last_reward=None,
        engines=(),
        waiting_for=(),
    )
    one.print(TerminalView(one).render(empty))
    assert "waiting" not in plain_line(empty)
    assert "next cell" not in plain_line(empty)


def test_a_watcher_gets_a_line_for_what_matters_and_none_for_the_rest() -> None:
    plan = c.Plan(
        commands=(
            c.DispatchGroups(
                command_id=CommandId(1),
                reason="",
                groups=((group_id(1), (execution_id(1), execution_id(2))),),
                version=0,
                burst=1,
            ),
            c.Launch(
                command_id=CommandId(2),
                reason="",
                execution=execution_id(1),
                engine=EngineId("s0"),
            ),
            c.EnterTraining(command_id=CommandId(3), reason="supply held 1 s", cell=0),
        )
    )
    assert notes_of(plan) == [
        "burst 1: 1 group dispatched, 2 executions",
        "cell 0 leaves rollout: supply held 1 s",
    ]
    assert notes_of(CommandApplied(command_id=CommandId(1))) == []
    joined = seen.MemberJoined(step=4, cell=2, is_mid_batch=True, pull_s=0.1)
    assert notes_of(joined) == ["cell 2 joined step 4 mid-batch"]
    quiet = seen.VersionPublished(engine="s0", version=1, checksum=0, held_s=0.0, num_continued=0)
    assert notes_of(quiet) == []
    told = seen.EvalResult(burst=1, version=3, rewards=[1.0, None, 0.5])
    assert notes_of(told) == ["eval reward of version 3: 0.750 on 3 held-out tasks"]


@pytest.mark.parametrize(
    ("mean_shaped", "words"), [(None, "0.500"), (0.5, "0.500"), (0.25, "0.500 (shaped 0.250)")]
)
def test_a_step_tells_the_shaped_mean_beside_the_raw_one_where_it_differs(
    mean_shaped: float | None, words: str
) -> None:
    step = report(mean_shaped=mean_shaped)
    line = f"step 3: 1 group, version 4, mean reward {words}, 20 tokens trained"
    assert notes_of(step) == [line]


def test_a_step_tells_in_one_line_where_the_tokens_of_its_executions_ended() -> None:
    kept = {"execution": "e000001", "reward": 1.0, "shaped": 1.0, "advantage": 1.0}
    step = report(
        is_short=True,
        num_no_variance=1,
        watched_share=0.25,
        num_flat_tokens=100,
        num_repeated_tokens=152,
        fill=0.875,
        members=[
            seen.MemberAccount(**kept, sampled=33, trained=20, masked={"not_selected": 13}),
            seen.MemberAccount(
                **kept,
                sampled=9,
                trained=0,
                masked={"not_selected": 1, "no_variance": 4},
                dropped={"relaunched": 4},
            ),
        ],
    )
    assert step_words(step) == (
        "short step 3: 1 group (1 with equal rewards), version 4, mean reward 0.500, "
        "20 tokens trained, "
        "18 masked (14 not_selected, 4 no_variance), 4 dropped (4 relaunched), "
        "25% of the best touched tests, tree 1.52x, fill 88%"
    )
    refused = report(is_applied=False, reason="the gradient of w is not finite", mean_reward=None)
    assert step_words(refused) == (
        "step 3: 1 group, no update (the gradient of w is not finite), mean reward none, "
        "0 tokens trained"
    )


def test_a_reduction_that_needed_more_tries_is_told_and_an_ordinary_one_is_not() -> None:
    assert "reduced" not in step_words(report(reduced_by="group", reduce_s=0.1))
    late = report(reduced_by="star", num_reduce_tries=3, reduce_s=12.5)
    assert step_words(late).endswith("20 tokens trained, reduced (star) at try 3")
    state = RunState()
    state.steps = [report(reduced_by="group", reduce_s=0.1234), late]
    rows = step_cells(state)
    assert [row["reduced"] for row in rows] == ["group", "star, try 3"]
    assert [row["reduce s"] for row in rows] == [0.12, 12.5]


def test_the_last_step_stays_in_the_live_view_and_is_cut_at_the_width() -> None:
    one, output = console(is_terminal=False, width=60)
    state = replace(STATE, last_step="step 3: 1 group, version 4, " + "x" * 80)
    one.print(TerminalView(one, is_live=False).render(state))
    (line,) = [line for line in output.getvalue().splitlines() if "version 4" in line]
    assert line.startswith("  last       step 3: 1 group, version 4, xxx")
    assert len(line) == 60


def report(**fields: Any) -> seen.StepReport:
    told: dict[str, Any] = {"mean_reward": 0.5, "is_applied": True, "is_short": False, **fields}
    return seen.StepReport(
        step=3,
        version_before=3,
        version_after=4,
        groups=["g00001"],
        micro_steps=[0],
        num_executions=2.0,
        num_tokens=20,
        loss=None,
        grad_norm=0.1,
        opened_s=0.0,
        closed_s=1.0,
        **told,
    )
