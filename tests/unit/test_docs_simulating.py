"""The page docs/simulating.md shows the scenario that is shipped, and what it prints."""

import re
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from opengyre.cli.simulate import SimulateOptions, run
from opengyre.config.load_simulation import load_simulation
from opengyre.simulate.from_config import scenario_of
from opengyre.simulate.workload import read_csv
from opengyre.simulate.world import simulate

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "simulating.md"
EXAMPLES = REPOSITORY / "examples"
SMALL = EXAMPLES / "small.toml"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(PAGE.read_text()) if found == kind]


def test_the_first_scenario_of_the_page_is_the_shipped_file() -> None:
    assert blocks("toml")[0] == SMALL.read_text()


def test_the_shipped_scenario_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with redirect_stdout(StringIO()) as out:
        run(SimulateOptions(scenario=SMALL, seeds=1))
    assert out.getvalue() == blocks("text")[0]


def test_the_death_of_the_page_takes_the_time_it_says_and_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.read_text())
    (tmp_path / "dies.toml").write_text(blocks("toml")[1])
    result = simulate(scenario_of(load_simulation(tmp_path / "dies.toml")), 1)
    assert not result.failed, result.reason
    assert f"takes {result.wall_s / 60:.1f} min" in PAGE.read_text()


def test_the_durations_of_the_page_are_read_and_run(tmp_path: Path) -> None:
    durations = next(text for text in blocks("") if text.startswith("group,"))
    assert [len(group) for group in read_csv(durations)] == [3, 2]
    (tmp_path / "durations.csv").write_text(durations)
    lines = SMALL.read_text().partition("[workload]")[0] + blocks("toml")[2]
    (tmp_path / "recorded.toml").write_text(lines)
    result = simulate(scenario_of(load_simulation(tmp_path / "recorded.toml")), 1)
    assert not result.failed, result.reason


def test_every_scenario_among_the_examples_is_taken_by_the_simulator() -> None:
    """A scenario is known by its keys, wherever it lies; runs' configs have a test of their own."""
    tables = {path: tomllib.loads(path.read_text()) for path in EXAMPLES.rglob("*.toml")}
    scenarios = [path for path, table in tables.items() if {"scenario", "extends"} & table.keys()]
    assert SMALL in scenarios
    assert len(scenarios) > len(list((EXAMPLES / "paper").glob("*.toml")))
    for path in scenarios:
        config = load_simulation(path)
        assert scenario_of(config).num_devices == config.topology.num_devices, path
