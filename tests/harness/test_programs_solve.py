"""The four real programs, unchanged, solve a task through the gateway and are recorded exactly."""

import pytest
from drawn_pairs import PROGRAMS
from plain_endpoint import plain_endpoint
from program_rig import APPENDING, LINES, Scene, profile_of
from wire_proxy import WireProxy

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("name", PROGRAMS)
def test_case_1_2_16_a_program_works_as_it_does_without_us_and_every_id_is_recorded(
    name: str,
) -> None:
    run = Scene(profile_of(name)).run()
    run.check_ended_well()
    assert run.files["out"].split() == list(LINES)
    run.check_recorded_exactly()
    run.check_one_unbroken_branch()
    assert len(run.committed) == len(run.turns) == len(run.calls) == len(LINES) + 1
    assert run.account.trained > 0

    with plain_endpoint(APPENDING) as address:
        straight = Scene(profile_of(name), proxy=lambda _: WireProxy(address)).run()
    straight.check_ended_well()
    assert straight.turns == []
    assert len(straight.calls) == len(run.calls)
    assert straight.files == run.files
