"""A run with a user's own profile file: its command line, its files, its labels."""

from pathlib import Path

import pytest
from run_rig import drive, make_trails

from opengyre.control import facts as f
from opengyre.store.observations import TurnRecorded

pytestmark = pytest.mark.timeout(120)

PROFILE = """\
[launch]
argv = ["{python}", "-I", "-S", "{gyre_agent}", "--instruction-file", "{home}/notes/told.md",
        "--max-turns", "{max_turns}", "--max-output-tokens", "{max_new_tokens}"]

[[launch.files]]
path = "notes/told.md"
text = "{instruction}"

[[labels]]
role = "side"
all = [{ field = "messages", matches = '"role":"tool"' }]
"""


def test_a_users_profile_launches_its_program_and_labels_its_calls(tmp_path: Path) -> None:
    trails = make_trails(tmp_path / "trails", 2)
    profile = tmp_path / "mine.toml"
    profile.write_text(PROFILE)
    driven = drive(
        tmp_path,
        trails,
        f'harness.profile="{profile}"',
        "run.num_steps=1",
        "schedule.run_ahead=0",
        "schedule.steps_per_burst=1",
        "engine.scripted.mistakes=0",
    )
    assert driven.end.exit_code == 0
    assert set(driven.outcomes().values()) == {f.Outcome.COMPLETED}
    assert {fact.reward for fact in driven.all(f.VerdictGiven)} == {1.0}
    turns = [told.turn for told in driven.all(TurnRecorded)]
    first = {turn.execution for turn in turns if turn.role == "main"}
    assert sorted(turn.turn for turn in turns if turn.role == "main") == sorted(
        f"{execution}.t1" for execution in first
    )
    assert {turn.role for turn in turns} == {"main", "side"}
