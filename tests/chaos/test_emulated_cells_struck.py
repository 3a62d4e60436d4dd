"""Whole runs whose cells are killed and stopped: one stage a cell, exact integer gradients."""

import os
from pathlib import Path

import numpy as np
import pytest
from run_rig import EXAMPLE, Driven, make_trails

from tests.chaos.chaos_rig import (
    assert_it_held,
    consumed,
    drive_struck,
    last_weights,
    num_steps_for,
    slots_for,
)
from tests.chaos.faults import MOST_FOR_ONE, Fault, chains, matrix, sample
from tests.chaos.striker import Striker

pytestmark = pytest.mark.timeout(400)

MOST_FAULTS = 2 * MOST_FOR_ONE
NUM_STEPS = num_steps_for(MOST_FAULTS)
SEED = int(os.environ.get("CHAOS_SEED", "1"))
SAMPLED = chains(sample(1, seed=SEED))[:1]
ALL = chains(matrix(1, seed=SEED))
EMULATED = (
    f"run.num_steps={NUM_STEPS}",
    "training.emulated_tokens_per_s=1500",
    "engine.scripted.tokens_per_s=400",
)


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 8)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, trails: Path) -> Driven:
    folder = tmp_path_factory.mktemp("undisturbed")
    return _drive(folder, trails, Striker([]))


def _drive(folder: Path, tasks: Path, striker: Striker) -> Driven:
    return drive_struck(
        folder,
        tasks,
        *EMULATED,
        slots_for(striker.left),
        watch=striker.watch,
        config=EXAMPLE,
        deadline_s=300,
    )


def _check(folder: Path, trails: Path, undisturbed: Driven, faults: list[Fault]) -> None:
    striker = Striker(faults)
    driven = _drive(folder, trails, striker)
    assert_it_held(driven, num_steps=NUM_STEPS)
    assert not striker.left
    assert consumed(driven) == consumed(undisturbed)
    for name, weights in last_weights(undisturbed).items():
        np.testing.assert_array_equal(last_weights(driven)[name], weights)


def _words(faults: list[Fault]) -> str:
    return ", ".join(str(one) for one in faults)


@pytest.mark.parametrize("faults", SAMPLED, ids=_words)
def test_a_struck_run_ends_with_the_weights_of_an_undisturbed_one(
    faults: list[Fault], tmp_path: Path, trails: Path, undisturbed: Driven
) -> None:
    _check(tmp_path, trails, undisturbed, faults)


@pytest.mark.slow
@pytest.mark.parametrize("faults", ALL, ids=_words)
def test_every_strike_of_the_matrix_costs_no_step_and_no_group(
    faults: list[Fault], tmp_path: Path, trails: Path, undisturbed: Driven
) -> None:
    _check(tmp_path, trails, undisturbed, faults)
