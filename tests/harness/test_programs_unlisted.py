"""A harness that no shipped profile is for works by its protocol alone."""

from pathlib import Path

import pytest
from program_rig import LINES, Scene, profile_of

PROFILE = Path(__file__).with_name("unlisted.toml")

pytestmark = pytest.mark.timeout(150)


def test_case_2_16_an_agent_that_nobody_made_a_profile_for_is_recorded_exactly() -> None:
    run = Scene(profile_of(str(PROFILE))).run()
    run.check_ended_well()
    assert run.files["out"].split() == list(LINES)
    run.check_recorded_exactly()
    run.check_one_unbroken_branch()
    headers = [record.header for record in run.committed]
    assert {header.role for header in headers} == {"main"}
    assert {header.protocol for header in headers} == {"openai-responses"}
    assert run.account.trained > 0
