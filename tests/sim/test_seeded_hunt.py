"""Many seeds in every mode, with faults: no promise breaks, and a seed is one run."""

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from opengyre.store.observations import RoleChange
from tests.sim.seeded_hunt import Found, hunt
from tests.sim.seeded_loop import Mode
from tests.sim.seeded_world import SeededWorld, stormy

REGRESSIONS = Path(__file__).with_name("seeded_regressions.txt")
ROOT = Path(__file__).parents[2]
NUM_SEEDS = 640
NUM_PROCESSES = 2

Seed = tuple[int, Mode]


def regressions() -> list[Seed]:
    lines = [line.partition("#")[0].split() for line in REGRESSIONS.read_text().splitlines()]
    return [(int(line[0]), Mode(line[1])) for line in lines if line]


def hunt_in_processes(seeds: list[Seed]) -> Found:
    """Every other seed in each process, started afresh so that none shares another's state."""
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(hunt, [seeds[k::NUM_PROCESSES] for k in range(NUM_PROCESSES)]))
    return sum(parts[1:], parts[0])


def journal_of(world: SeededWorld) -> list[object]:
    """Every row but the memory of this machine's process."""
    values = [row.value for row in world.checks.rows]
    return [value for value in values if not isinstance(value, RoleChange)]


def check(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        os.write(1, f"\n{found.num_runs} seeded runs; faults: {dict(found.num_faults)}\n".encode())
    assert not found.broken, f"keep these in {REGRESSIONS.name}:\n{found.lines()}"


@pytest.mark.timeout(300)
def test_seeds_that_once_broke_a_promise_keep_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    check(hunt(regressions()), capsys)


@pytest.mark.timeout(900)
def test_every_seed_keeps_every_promise_in_each_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = hunt_in_processes([(seed, mode) for seed in range(NUM_SEEDS) for mode in Mode])
    check(found, capsys)
    assert found.num_runs == NUM_SEEDS * len(Mode)
    assert len(found.num_faults) == 10


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_further_seeds_keep_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    check(hunt_in_processes([(n, list(Mode)[n % 3]) for n in range(1000, 11_000)]), capsys)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_seed_and_mode_give_the_same_steps_at_the_same_times(mode: Mode) -> None:
    for seed in (3, 9):
        worlds = [SeededWorld(seed=seed, mode=mode, weather=stormy(seed)) for _ in range(2)]
        for world in worlds:
            world.run()
        first, second = ((world.loop.digest, world.loop.num_steps) for world in worlds)
        assert first == second
        assert journal_of(worlds[0]) == journal_of(worlds[1])


def test_another_process_with_another_hash_seed_runs_the_same_steps() -> None:
    words = (
        "from tests.sim.seeded_world import *; w = SeededWorld(seed=7, mode=Mode.SHUFFLE,"
        " weather=stormy(7)); w.run(); print(w.loop.digest, w.loop.num_steps)"
    )
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        told = subprocess.run(
            [sys.executable, "-c", words],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=environment,
            timeout=60,
        )
        outputs.append(told.stdout)
    assert outputs[0] == outputs[1]


def test_the_modes_run_a_seed_in_different_orders() -> None:
    worlds = [SeededWorld(seed=5, mode=mode, weather=stormy(5)) for mode in Mode]
    for world in worlds:
        world.run()
    assert len({world.loop.digest for world in worlds}) == len(Mode)
