"""The four real programs, unchanged, solve a task through the gateway and are recorded exactly."""

import pytest
from drawn_pairs import PROGRAMS
from program_rig import LINES, Scene, profile_of

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("name", PROGRAMS)
def test_case_1_and_2_a_program_works_with_its_tools_and_every_id_is_recorded(name: str) -> None:
    run = Scene(profile_of(name)).run()
    run.check_ended_well()
    assert run.files["out"].split() == list(LINES)
    run.check_recorded_exactly()
    run.check_one_unbroken_branch()
    assert len(run.committed) == len(run.turns) == len(run.calls)
    assert len(run.committed) >= len(LINES) + 1
    assert run.num_trainable_tokens > 0
