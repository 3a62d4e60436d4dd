"""A whole run with a real program as its harness: dispatch, launch, record, grade, train."""

from pathlib import Path

import pytest
from program_rig import profile_of
from run_rig import drive

from opengyre.control import facts as f
from opengyre.runtime.trying.example_task import write_example_task
from opengyre.store.observations import StepReport, TurnRecorded
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(200)

POLICY = Path(__file__).with_name("solver_policy.py")
CONTEXT_TOKENS = 150_000


@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_a_run_trains_on_what_a_real_program_did(name: str, tmp_path: Path) -> None:
    profile_of(name)
    (tmp_path / "tasks").mkdir()
    write_example_task(tmp_path / "tasks" / "sum")
    driven = drive(
        tmp_path,
        tmp_path / "tasks",
        f'harness.profile="{name}"',
        f'engine.scripted.policy="{POLICY}:respond"',
        "engine.scripted.tokens_per_s=0",
        "engine.scripted.mistakes=0",
        f"sampling.context_tokens={CONTEXT_TOKENS}",
        f"training.micro_step_tokens={CONTEXT_TOKENS}",
        "sampling.max_new_tokens=1000",
        "run.num_steps=1",
        "schedule.group_size=2",
        "schedule.groups_per_step=1",
        "schedule.steps_per_burst=1",
        "schedule.run_ahead=0",
    )
    assert driven.end.exit_code == 0, driven.end.reason
    assert set(driven.outcomes().values()) == {f.Outcome.COMPLETED}
    verdicts = driven.all(f.VerdictGiven)
    assert {fact.reward for fact in verdicts} == {0.0, 1.0}
    assert all(fact.num_trainable_tokens > 0 for fact in verdicts)
    turns = [told.turn for told in driven.all(TurnRecorded)]
    assert [turn.role for turn in turns if turn.is_committed] == ["main"] * 6
    assert [step.is_applied for step in driven.all(StepReport)] == [True]
    assert all(result.is_kept for result in verify_run(open_run_folder(driven.end.folder)))
