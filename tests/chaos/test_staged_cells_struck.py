"""Whole runs of a real model whose cells, or one pipeline stage of them, are killed and stopped."""

import os
from pathlib import Path

import pytest
from run_rig import make_trails

from tests.chaos.chaos_rig import STAGED, assert_it_held, drive_struck, num_steps_for, slots_for
from tests.chaos.faults import Fault, chains, matrix, sample
from tests.chaos.striker import Striker

pytestmark = pytest.mark.timeout(600)

NUM_STAGES = 2
SEED = int(os.environ.get("CHAOS_SEED", "1"))
SAMPLED = chains(sample(NUM_STAGES, seed=SEED), most_for_one=2)[:1]
ALL = chains(matrix(NUM_STAGES, seed=SEED))


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 8)


def _check(folder: Path, trails: Path, faults: list[Fault]) -> None:
    striker = Striker(faults)
    driven = drive_struck(
        folder,
        trails,
        f"run.num_steps={num_steps_for(len(faults))}",
        slots_for(faults),
        watch=striker.watch,
        config=STAGED,
        deadline_s=540,
    )
    assert_it_held(driven, num_steps=num_steps_for(len(faults)))
    assert not striker.left


def _words(faults: list[Fault]) -> str:
    return ", ".join(str(one) for one in faults)


@pytest.mark.parametrize("faults", SAMPLED, ids=_words)
def test_a_struck_run_makes_every_step_and_keeps_every_promise(
    faults: list[Fault], tmp_path: Path, trails: Path
) -> None:
    _check(tmp_path, trails, faults)


@pytest.mark.slow
@pytest.mark.parametrize("faults", ALL, ids=_words)
def test_every_strike_of_the_matrix_costs_no_step_and_no_promise(
    faults: list[Fault], tmp_path: Path, trails: Path
) -> None:
    _check(tmp_path, trails, faults)
