"""Whole runs of the real shell in virtual time, whatever order its callbacks come in."""

import pytest

from tests.sim.seeded_loop import Mode
from tests.sim.seeded_world import SeededWorld


@pytest.mark.parametrize("mode", list(Mode))
def test_an_undisturbed_run_ends_with_every_promise_kept(mode: Mode) -> None:
    world = SeededWorld(seed=0, mode=mode)
    end = world.run()
    assert end is not None
    assert end.exit_code == 0
    assert world.sandbox.num_answers > 0
