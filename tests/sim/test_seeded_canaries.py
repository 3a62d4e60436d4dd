"""Each planted bug is found within 200 seeds; otherwise the hunt proves nothing."""

import os

import pytest

from tests.sim.canaries import CANARIES
from tests.sim.seeded_hunt import hunt
from tests.sim.seeded_loop import Mode

# A world that a planted bug breaks is ended in its middle: what it was about to start never is.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MAX_SEEDS = 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CANARIES)
def test_the_hunt_finds_the_planted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = [(seed, mode) for seed in range(MAX_SEEDS) for mode in Mode]
    with CANARIES[name].planted():
        found = hunt(seeds, num_most_broken=1)
    assert found.broken, f"{CANARIES[name].words}: not found in {MAX_SEEDS} seeds"
    with capsys.disabled():
        words = f"canary {name!r} found after {found.num_runs} runs: {found.lines()[:160]}"
        os.write(1, f"\n{words}\n".encode())
