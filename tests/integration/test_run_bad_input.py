"""What a user can get wrong: one line, exit code 2, and nothing half-written."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from run_rig import EXAMPLE, ROOT, make_trails

from opengyre.runtime.prepare import model_folder
from opengyre.seams.errors import ConfigError

MODEL = ROOT / "examples" / "quickstart" / "model"


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 2)


def gyre(tmp_path: Path, trails: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    sets = [f'tasks=[{{path="{trails}"}}]', *overrides]
    words = [part for one in sets for part in ("--set", one)]
    command = [str(Path(sys.executable).with_name("gyre")), "train", str(EXAMPLE)]
    return subprocess.run(
        [*command, "--run", str(tmp_path / "run"), *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(result: subprocess.CompletedProcess[str], tmp_path: Path, *words: str) -> None:
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("gyre: ")
    for word in words:
        assert word in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_missing_task_folder_is_named(tmp_path: Path, trails: Path) -> None:
    result = gyre(tmp_path, tmp_path / "nowhere")
    assert_refused(result, tmp_path, str(tmp_path / "nowhere"))


def test_a_task_without_an_instruction_is_named(tmp_path: Path, trails: Path) -> None:
    broken = shutil.copytree(trails, tmp_path / "broken")
    first = sorted(broken.iterdir())[0]
    (first / "instruction.md").unlink()
    assert_refused(gyre(tmp_path, broken), tmp_path, first.name, "instruction.md")


def test_a_config_that_cannot_work_names_the_key(tmp_path: Path, trails: Path) -> None:
    result = gyre(tmp_path, trails, "schedule.max_staleness=0")
    assert_refused(result, tmp_path, "schedule.max_staleness = 0", "expected at least 2")


def test_an_unknown_key_is_answered_with_the_nearest_one(tmp_path: Path, trails: Path) -> None:
    result = gyre(tmp_path, trails, "schedule.group_sise=4")
    assert_refused(result, tmp_path, "schedule.group_sise", "schedule.group_size")


def test_a_port_in_use_is_named(tmp_path: Path, trails: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = gyre(tmp_path, trails, f"gateway.port={port}")
    assert_refused(result, tmp_path, str(port), "in use")


def test_a_model_folder_without_a_tokenizer_is_named(tmp_path: Path, trails: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    result = gyre(tmp_path, trails, f'model.path="{model}"')
    assert_refused(result, tmp_path, str(model), "tokenizer.json")


def test_an_architecture_that_the_engine_cannot_run_is_named(tmp_path: Path, trails: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    config = model / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"gpt2"'))
    result = gyre(tmp_path, trails, f'model.path="{model}"')
    assert_refused(result, tmp_path, "gpt2", "qwen3")


def test_a_model_with_fewer_layers_than_stages_is_named(tmp_path: Path, trails: Path) -> None:
    sets = ('topology.engine="embedded"', 'topology.cell="embedded"', "topology.stages_per_cell=4")
    result = gyre(tmp_path, trails, *sets)
    assert_refused(result, tmp_path, "3 layers", "topology.stages_per_cell = 4", "3 or less")


def test_emulated_cells_have_one_stage(tmp_path: Path, trails: Path) -> None:
    result = gyre(tmp_path, trails, "topology.stages_per_cell=2")
    assert_refused(result, tmp_path, "topology.stages_per_cell = 2", "expected 1")


def test_weights_in_several_files_are_a_model_too(tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        model_folder(str(model))
    (model / "model.safetensors.index.json").write_text("{}")
    assert model_folder(str(model)) == model


def test_a_transform_that_does_not_work_is_named(tmp_path: Path, trails: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def shape(reward, stats):\n    return reward - stats.num_trns\n")
    typo = gyre(tmp_path, trails, f'reward.transforms=["{mine}:shaep"]')
    assert_refused(typo, tmp_path, "reward.transforms", f"{mine}:shaep", "no function shaep")
    wrong = gyre(tmp_path, trails, f'reward.transforms=["{mine}:shape"]')
    assert_refused(wrong, tmp_path, "reward.transforms", "AttributeError", "num_trns")


def test_a_run_folder_that_is_in_use_stays_as_it_is(tmp_path: Path, trails: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep me")
    result = gyre(tmp_path, trails)
    assert result.returncode == 2
    assert "not empty" in result.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
