"""A run whose cells leave while their requests are live: what moves takes its prefix along."""

import pytest
from quickstart_rig import make_tasks
from run_rig import Driven, drive
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.seams.kv import HandoffStage
from opengyre.store.observations import Continued, Handoff, RunStarted
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Slow tokens, steps of half a second, four bursts: turns are live when cells leave and when a
    version is published, and executions that wait for a background job are in a tool call."""
    folder = tmp_path_factory.mktemp("handoffs")
    return drive(
        folder,
        make_tasks(folder / "tasks", seed=5, num=8),
        "training.emulated_tokens_per_s=1000",
        "training.micro_step_tokens=560",
        "engine.scripted.tokens_per_s=15",
        'engine.kv_handoff="on"',
        "engine.kv_handoff_idle=true",
        "run.num_steps=8",
    )


def test_the_journal_shows_every_stage_of_what_moved(driven: Driven) -> None:
    assert driven.end.exit_code == 0
    assert any(one.reason == "move" for one in driven.all(Continued))
    by_ref: dict[str, list[HandoffStage]] = {}
    for one in driven.all(Handoff):
        by_ref.setdefault(one.ref, []).append(one.stage)
    whole = list(HandoffStage)
    assert whole in by_ref.values()
    assert [stage for stage in whole if stage is not HandoffStage.TAKEN_OVER] in by_ref.values()
    assert {stages[-1] for stages in by_ref.values()} == {HandoffStage.RELEASED}


def test_a_publication_hands_nothing_over(driven: Driven) -> None:
    """What it finds live at an engine is continued there, and computed under the new weights."""
    continued = [one for one in driven.all(Continued) if one.reason == "publication"]
    standalone = {one.engine for one in driven.all(RunStarted)[0].engines if one.cell is None}
    assert {one.from_engine for one in continued} & standalone
    assert not {one.from_engine for one in driven.all(Handoff)} & standalone


def test_verify_proves_it_and_show_counts_it(driven: Driven) -> None:
    results = {one.promise: one for one in verify_run(open_run_folder(driven.end.folder))}
    assert [one.problems for one in results.values() if not one.is_kept] == []
    assert results["P6"].num_checked > 0
    assert results["P16"].num_checked == len({one.ref for one in driven.all(Handoff)})
    shown = CliRunner().invoke(app, ["run", "show", str(driven.end.folder)])
    assert "handed over" in shown.output
