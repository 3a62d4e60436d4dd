"""What each cell did of a step, from the stream to the table of `gyre run show`."""

import msgspec

from opengyre.runtime.step_figures import work_of
from opengyre.seams.cells import StageTimes
from opengyre.store.observations import CellWork, StepReport
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.views.run_state import RunState
from opengyre.views.tables import table, work_cells
from tests.training_rows import alone, line_row


def _work() -> dict[str, CellWork]:
    """Cell 2 dies with what it did; cell 10 came too late for anything."""
    bundles = alone(*(line_row(f"e{k}", 5) for k in range(4)))
    settings = StreamSettings(budget_tokens=5, lease_s=1.0, max_groups=1)
    stream = StepStream(3, version=0, bundles_of=lambda group: bundles, settings=settings)
    for cell in (0, 2, 10):
        stream.admit(cell)
    stream.offer(["g"])
    lost = stream.claim(2, 0.0).micro_step
    assert lost is not None
    stream.done(2, lost.number)
    stream.claim(2, 0.0)
    stream.close(1)
    stream.drop_member(2)
    stream.done(2, lost.number)
    while (made := stream.claim(0, 0.0).micro_step) is not None:
        stream.done(0, made.number)
    return work_of(stream)


def _report(work: dict[str, CellWork], stages: dict[str, list[StageTimes]]) -> StepReport:
    return StepReport(
        step=3,
        version_before=0,
        version_after=1,
        groups=["g"],
        micro_steps=[2, 3, 4, 5],
        num_executions=4.0,
        num_tokens=16,
        loss=0.0,
        grad_norm=1.0,
        is_applied=True,
        is_short=False,
        mean_reward=None,
        opened_s=0.0,
        closed_s=1.0,
        stages=stages,
        cells=work,
    )


def test_every_cell_of_a_step_is_told_with_what_it_gave_back_and_what_was_refused() -> None:
    assert _work() == {
        "c0": CellWork(num_claimed=4, num_done=4, num_tokens=20),
        "c2": CellWork(num_claimed=2, num_done=1, num_tokens=5, num_returned=2, num_refused=1),
        "c10": CellWork(num_claimed=0, num_done=0, num_tokens=0),
    }


def test_the_table_has_a_line_for_each_cell_and_seconds_stage_by_stage() -> None:
    stages = [StageTimes(forward_s=1.0, backward_s=2.0), StageTimes(bubble_s=0.25)]
    report = _report(_work(), {"c0": stages})
    state = RunState()
    state.steps.append(msgspec.json.decode(msgspec.json.encode(report), type=StepReport))
    rows = work_cells(state)
    assert [row["cell"] for row in rows] == ["c0", "c2", "c10"]
    assert rows[0]["forward s"] == "1.00 0.00"
    assert rows[0]["bubble s"] == "0.00 0.25"
    assert (rows[1]["returned"], rows[1]["refused"], rows[1]["forward s"]) == (2, 1, "-")
    assert table(rows)[0].split()[:4] == ["step", "cell", "claimed", "done"]


def test_a_step_of_an_older_journal_has_no_lines_of_cells() -> None:
    state = RunState()
    state.steps.append(_report({}, {}))
    assert work_cells(state) == []
