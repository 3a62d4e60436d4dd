"""Scenario files: read over what they extend, refused by key, and carried over field by field."""

import ast
import dataclasses
from pathlib import Path

import pytest

from opengyre.config.keys import Key, known_keys, walk
from opengyre.config.load_simulation import load_simulation, scenario_files
from opengyre.config.simulation import SimulationConfig
from opengyre.config.simulation_costs import (
    CheckpointCostsConfig,
    EngineCostsConfig,
    GraderCostsConfig,
    PublicationCostsConfig,
    SwitchCostsConfig,
    ToolCostsConfig,
    TrainingCostsConfig,
)
from opengyre.seams.errors import ConfigError
from opengyre.simulate import costs
from opengyre.simulate.from_config import scenario_of

REPOSITORY = Path(__file__).resolve().parents[2]
PAPER = REPOSITORY / "examples" / "paper"
ROWS = ["A0", "A3", "C0", "C1", "C2", "E0", "E1", "E2"]
SMALL = """
[scenario]
num_steps = 4
[topology]
num_cells = 3
devices_per_cell = 2
slots_per_device = 4.0
[costs.training]
group_device_s = 100.0
[workload]
mean_s = 60.0
"""


def written(folder: Path, text: str, name: str = "small.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("key", list(walk(SimulationConfig)), ids=lambda key: key.path)
def test_the_key_says_what_it_means(key: Key) -> None:
    assert key.field.description


def test_no_key_is_left_unread() -> None:
    package = REPOSITORY / "src" / "opengyre"
    files = [path for folder in ("simulate", "cli") for path in (package / folder).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    keys = known_keys(SimulationConfig)
    assert not [key for key in keys if key.rsplit(".", 1)[-1] not in names]


@pytest.mark.parametrize(
    ("model", "simulated"),
    [
        (TrainingCostsConfig, costs.TrainingCosts),
        (EngineCostsConfig, costs.EngineCosts),
        (SwitchCostsConfig, costs.SwitchCosts),
        (PublicationCostsConfig, costs.PublicationCosts),
        (CheckpointCostsConfig, costs.CheckpointCosts),
        (GraderCostsConfig, costs.GraderCosts),
        (ToolCostsConfig, costs.ToolCosts),
    ],
)
def test_a_table_of_costs_has_the_fields_and_defaults_of_the_cost_model(
    model: type[TrainingCostsConfig], simulated: type[costs.TrainingCosts]
) -> None:
    fields = {one.name: one.default for one in dataclasses.fields(simulated)}
    assert list(model.model_fields) == list(fields)
    for name, field in model.model_fields.items():
        if not field.is_required():
            assert field.default == fields[name], name


def test_the_rows_of_the_paper_are_the_scenarios_of_its_folder() -> None:
    assert [path.stem for path in scenario_files(PAPER)] == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_the_example_is_a_scenario_that_the_simulator_takes(row: str) -> None:
    config = load_simulation(PAPER / f"{row}.toml")
    assert scenario_of(config).num_devices == config.topology.num_devices == 32


def test_a_scenario_is_named_after_its_file_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert load_simulation(written(tmp_path, SMALL)).scenario.name == "small"
    named = load_simulation(written(tmp_path, SMALL), ["scenario.name=other"])
    assert named.scenario.name == "other"


def test_a_file_name_that_is_long_or_not_text_still_names_its_scenario(tmp_path: Path) -> None:
    long = load_simulation(written(tmp_path, SMALL, f"{'a' * 100}.toml"))
    assert long.scenario.name == "a" * 64
    odd = load_simulation(written(tmp_path, SMALL, "a\udcff\n.toml"))
    assert odd.scenario.name == "a??"


def test_a_file_lies_over_the_one_it_extends_key_by_key(tmp_path: Path) -> None:
    written(tmp_path, SMALL, "base.toml")
    top = written(tmp_path, 'extends = "base.toml"\n[topology]\nnum_cells = 5\n', "top.toml")
    topology = load_simulation(top).topology
    assert (topology.num_cells, topology.devices_per_cell) == (5, 2)
    assert scenario_files(tmp_path) == [top]


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 'extends = "other.toml"\n')
    written(tmp_path, 'extends = "small.toml"\n', "other.toml")
    with pytest.raises(ConfigError, match=r"small.toml -> .*other.toml -> .*small.toml: expected"):
        load_simulation(path)
    for number in range(6):
        written(tmp_path, f'extends = "{number + 1}.toml"\n', f"{number}.toml")
    with pytest.raises(ConfigError, match="expected at most 4 extends in a row"):
        load_simulation(tmp_path / "0.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extends = "nothing.toml"\n', "small.toml: extends: .*nothing.toml: no such config file"),
        ('extends = ""\n', "expected the path of a scenario file"),
        ('extends = "a\\u0000b"\n', "expected the path of a scenario file"),
        ("a = " + "[" * 3000 + "]" * 3000, "expected fewer brackets"),
        ("a = " + "9" * 5000, "cannot read the config file: .*digits"),
        ("a = 0x" + "f" * 5000, "expected values of a usual size: .*digits"),
    ],
    ids=lambda text: text[:60],
)
def test_a_file_that_cannot_be_meant_is_refused_in_one_line(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_simulation(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert load_simulation(written(tmp_path, "\ufeff" + SMALL)).topology.num_cells == 3


def test_a_csv_file_of_durations_is_found_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("group,duration_s\na,10\na,30\nb,20\n")
    text = SMALL.replace("mean_s = 60.0", 'csv = "trace.csv"')
    assert scenario_of(load_simulation(written(tmp_path, text))).workload.mean_s == 20.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule.grup_size=4", "schedule.grup_size: unknown key; did you mean schedule.group"),
        ("costs.training.eficiency=1.0", "did you mean costs.training.efficiency?"),
        ("topology.num_cells=0", "topology.num_cells = 0: expected at least 1"),
        ("topology.num_cells=2.5", "topology.num_cells = 2.5: expected an integer"),
        ("schedule.policy=greedy", "'elastic', 'colocate' or 'async'"),
        ("schedule.policy=async", "schedule.num_training_cells = 0: expected 1 to 2"),
        ("schedule.num_training_cells=1", 'because schedule.policy = "elastic"'),
        ("schedule.max_staleness=1", "schedule.max_staleness = 1: expected at least 2"),
        ("schedule.supply_fraction=0.8", "expected at most 0.5"),
        ("scenario.stop_after_step=9", "expected at most scenario.num_steps = 4"),
        ("workload.csv=a.csv", "expected either mean_s (lognormal) or csv"),
        ("workload.mean_s=nan", "workload.mean_s = "),
        ("workload.mean_s=1e-9", "expected at least 1e-06"),
        ("workload.mean_s=" + "9" * 5000, "--set: expected a value of a usual size"),
        ("a" + ".a" * 3000 + "=1", "expected values of a usual size"),
        ('scenario.name="a\\nb"', "expected letters, digits and signs on one line"),
        (
            "schedule={groups_per_step=65536, group_size=16}",
            "expected at most 2_000_000 executions at a time",
        ),
        (f"scenario.name={'a' * 65}", "expected at most 64 characters"),
        ('workload.csv="a\\u0000b"', "expected a path without a zero byte"),
        ("scenario.published_time=1e-300", "scenario.published_time = 1e-300"),
    ],
    ids=lambda text: text[:60],
)
def test_bad_input_is_refused_in_one_line_that_names_the_key(
    tmp_path: Path, override: str, words: str
) -> None:
    path = written(tmp_path, SMALL)
    with pytest.raises(ConfigError) as caught:
        load_simulation(path, [override])
    assert words in str(caught.value)
    assert str(caught.value).startswith((f"{path}: ", "--set: "))
    assert "\n" not in str(caught.value)


def test_a_failure_of_an_engine_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL + '[[failures]]\nat_s = 5.0\nengine = "c7"\n')
    with pytest.raises(ConfigError, match=r"failures\[0\]\.engine = c7: expected c0 to c2"):
        load_simulation(path)


def test_a_missing_key_and_a_missing_file_say_what_was_expected(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL.replace("num_cells = 3\n", ""))
    with pytest.raises(ConfigError, match=r"topology\.num_cells is missing: expected cells"):
        load_simulation(path)
    with pytest.raises(ConfigError, match="no such config file"):
        load_simulation(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="no scenario file"):
        scenario_files(tmp_path / "nothing")
