"""A config that works is read whole; one that cannot work is refused in words."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from opengyre.config.load import config_schema, load_config, parse_resolved, resolved_json
from opengyre.config.root import config_warnings
from opengyre.config.toml import resolved_toml
from opengyre.seams.errors import ConfigError

LEAST = """
[run]
dir = "runs"
num_steps = 6
[model]
path = "model"
[[tasks]]
path = "tasks"
"""


@pytest.fixture
def least(tmp_path: Path) -> Path:
    path = tmp_path / "least.toml"
    path.write_text(LEAST)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return str(refused.value).replace(f"{path}: ", "")


def test_the_least_config_gets_the_designs_defaults(least: Path) -> None:
    schedule = load_config(least).schedule
    assert (schedule.group_size, schedule.groups_per_step) == (8, 16)
    assert (schedule.steps_per_burst, schedule.run_ahead) == (2, 1)
    assert (schedule.supply_fraction, schedule.supply_hold_s) == (0.125, 1.0)
    assert (schedule.max_void_in_a_row, schedule.max_staleness) == (48, 3)
    assert (schedule.recall_after_s, schedule.join_deadline_s) == (60.0, 30.0)
    assert (schedule.publish_timeout_s, schedule.hold_max_s) == (120.0, 240.0)
    assert (schedule.min_valid_members, schedule.max_launches) == (2, 2)


@pytest.mark.parametrize("key", ["run.dir", "model.path"])
def test_a_home_that_nobody_has_is_refused_in_words(least: Path, key: str) -> None:
    assert "expected a path that leads somewhere" in refusal(least, f"{key}=~nobody-here/x")


def test_computed_defaults_follow_what_they_are_computed_from(least: Path) -> None:
    schedule = load_config(
        least, ["schedule.groups_per_step=4", "schedule.steps_per_burst=5", "schedule.run_ahead=2"]
    ).schedule
    assert (schedule.max_void_in_a_row, schedule.max_staleness) == (12, 7)


def test_relative_paths_start_at_the_folder_of_the_file(least: Path) -> None:
    config = load_config(least, ["engine.scripted.policy=play.py:answer"])
    assert config.run.dir == least.parent / "runs"
    assert config.tasks[0].path == least.parent / "tasks"
    assert config.model.path == str(least.parent / "model")
    assert config.engine.scripted.policy == f"{least.parent}/play.py:answer"
    assert config.run.name == "least"


def test_an_owner_and_name_is_a_hub_id_unless_such_a_folder_exists(least: Path) -> None:
    assert load_config(least, ["model.path=some/model"]).model.path == "some/model"
    (least.parent / "some" / "model").mkdir(parents=True)
    assert load_config(least, ["model.path=some/model"]).model.path.endswith("/some/model")
    assert load_config(least, ["model.path=some/model"]).model.path.startswith("/")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "schedule.grup_size=8",
            "schedule.grup_size: unknown key; did you mean schedule.group_size?",
        ),
        ("group_size=8", "group_size: unknown key; did you mean schedule.group_size?"),
        ("tasks[0].wieght=1", "tasks[0].wieght: unknown key; did you mean tasks[0].weight?"),
        (
            "harness.limits.memory=1",
            "harness.limits.memory: unknown key; did you mean harness.limits.memory_bytes?",
        ),
        ("schedule.group_size=x", 'schedule.group_size = "x": expected an integer'),
        ("schedule.group_size=true", "schedule.group_size = true: expected an integer"),
        ("schedule.group_size=8.5", "schedule.group_size = 8.5: expected an integer"),
        ("schedule.group_size=1", "schedule.group_size = 1: expected at least 2"),
        ("schedule.supply_fraction=0.6", "schedule.supply_fraction = 0.6: expected at most 0.5"),
        ("schedule.overdue=no", "schedule.overdue = \"no\": expected 'wait' or 'drop'"),
        ("sampling.temperature=inf", "sampling.temperature = Infinity: expected a finite number"),
        ("run.dir=3", 'run.dir = 3: expected a string in "quotes"'),
        ("schedule=3", "schedule = 3: expected a table of keys"),
        ("tasks=[]", "tasks = []: expected at least 1 of them"),
        ("tasks[0].weight=0", "tasks[0].weight = 0: expected more than 0.0"),
        ("eval.at_end=false", "eval.path is missing: expected folder of held-out task folders"),
        (
            "engine.scripted.policy=play",
            'engine.scripted.policy = "play": expected file.py:function or module:function',
        ),
    ],
)
def test_a_refusal_is_one_line_with_key_value_and_what_was_expected(
    least: Path, override: str, words: str
) -> None:
    assert refusal(least, override) == words


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["schedule.max_staleness=1"], "schedule.max_staleness = 1: expected at least 2"),
        (["schedule.group_size=2", "schedule.min_valid_members=3"], "schedule.min_valid_members"),
        (["schedule.hold_max_s=10"], "schedule.hold_max_s = 10"),
        (["sampling.max_new_tokens=8192"], "sampling.max_new_tokens = 8192"),
        (["engine.kv_tokens=65536"], "engine.kv_tokens = 65536: expected at least 262144"),
        (["sampling.temperature=0"], "sampling.temperature = 0: expected more than 0"),
        (["model.dtype=bfloat16"], 'model.dtype = "bfloat16": expected "float32" or "float64"'),
        (
            ["engine.kv_handoff=off", "engine.kv_handoff_idle=true"],
            'engine.kv_handoff_idle = true: expected engine.kv_handoff = "on" or "auto"',
        ),
        (["training.micro_step_tokens=100"], "training.micro_step_tokens = 100"),
        (["eval.path=tasks"], "eval.path"),
        (["eval.path=e", "eval.at_start=false", "eval.at_end=false"], "eval.every_bursts = 0"),
        (["schedule.policy=async"], "schedule.num_training_cells = 0: expected 1 to 3"),
        (['training.trained_roles=["main", "main"]'], "training.trained_roles = "),
        (["reward.format_penalty.weight=0.2"], "reward.transforms = []: expected format_penalty"),
        (
            ['reward.transforms=["format_penalty", "format_penalty"]'],
            "reward.transforms = ['format_penalty', 'format_penalty']: expected each once",
        ),
        (["grading.exit_rewards={0 = 0.5}"], "grading.exit_rewards = {0: 0.5}: expected it beside"),
        (
            ['harness.overall_timeout_verdict="graded"'],
            'harness.overall_timeout_verdict = "graded": expected harness.overall_timeout_s',
        ),
        (["schedule.num_training_cells=1"], "schedule.num_training_cells = 1: expected 0"),
        (
            ["topology.engine=scripted", "topology.cell=emulated"],
            "engine.scripted.policy is missing",
        ),
        (
            ["topology.engine=scripted", "engine.scripted.policy=p.py:f"],
            'topology.cell = "embedded"',
        ),
        (["topology.cell=emulated"], 'topology.cell = "emulated"'),
        (["harness.profile=command"], "harness.command = []"),
        (["harness.command=['sh']"], "harness.command = ['sh']"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    least: Path, overrides: list[str], key: str
) -> None:
    words = refusal(least, *overrides)
    assert words.startswith(key)
    assert "\n" not in words


def test_the_same_folder_twice_among_the_tasks_is_refused(least: Path) -> None:
    least.write_text(LEAST + '[[tasks]]\npath = "tasks"\n')
    assert refusal(least).startswith("tasks[1].path")


def test_all_problems_are_told_at_once(least: Path) -> None:
    words = refusal(least, "schedule.group_size=0", "run.num_steps=0")
    assert [line.split(" = ")[0] for line in words.splitlines()] == [
        "run.num_steps",
        "schedule.group_size",
    ]


def test_a_missing_file_and_bad_toml_are_refused_by_name(tmp_path: Path) -> None:
    assert "no such config file" in refusal(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    assert refusal(broken).startswith("not valid TOML")
    broken.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal(broken)
    assert "cannot read" in refusal(tmp_path)


def test_resolved_json_and_toml_read_back_as_the_same_config(least: Path) -> None:
    config = load_config(least, ["eval.path=held-out", 'run.name="a.b"', "training.betas=[0.5, 0]"])
    assert parse_resolved(resolved_json(config)) == config
    again = least.with_name("again.toml")
    again.write_text(resolved_toml(config))
    assert load_config(again) == config


def test_what_is_no_resolved_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        parse_resolved("{")
    with pytest.raises(ConfigError, match=r"run is missing"):
        parse_resolved("{}")


def test_run_ahead_beyond_the_slots_without_the_core_warns_with_the_number(least: Path) -> None:
    (warning,) = config_warnings(load_config(least))
    assert "128 executions" in warning
    assert "24 slots" in warning
    assert not config_warnings(load_config(least, ["topology.slots_per_standalone=112"]))


def test_sampling_from_less_than_the_trainer_counts_on_is_told(least: Path) -> None:
    room = "topology.slots_per_standalone=112"
    cut = ["sampling.top_p=0.95", "sampling.min_p=0.1"]
    (warning,) = config_warnings(load_config(least, [room, *cut]))
    assert warning.startswith("sampling.top_p = 0.95 and sampling.min_p = 0.1: ")
    (warning,) = config_warnings(load_config(least, [room, "sampling.top_k=50"]))
    assert warning.startswith("sampling.top_k = 50: ")
    assert not config_warnings(load_config(least, [room, "sampling.temperature=0.5"]))
    emulated = ["topology.engine=scripted", "topology.cell=emulated", "engine.scripted.policy=p:f"]
    assert not config_warnings(load_config(least, [room, *cut, *emulated]))


def test_a_config_cannot_be_changed_after_it_was_read(least: Path) -> None:
    config = load_config(least)
    with pytest.raises(ValidationError):
        config.run.seed = 3  # type: ignore[misc]  # the point of the test


def test_the_schema_names_every_section_and_refuses_others() -> None:
    schema = config_schema()
    assert set(schema["required"]) == {"run", "model", "tasks"}
    assert schema["additionalProperties"] is False
