"""`[training]` keys of the objective: what a name brings along, what may replace it."""

from pathlib import Path

import pytest

from opengyre.config.load import load_config, parse_resolved, resolved_json
from opengyre.config.root import RunConfig, config_warnings
from opengyre.config.training import objective_warnings
from opengyre.seams.errors import ConfigError

LEAST = """
[run]
dir = "runs"
num_steps = 6
[model]
path = "model"
[[tasks]]
path = "tasks"
[training]
"""
Brought = tuple[float, float, str, str]


def _config(folder: Path, training: str) -> RunConfig:
    path = folder / "least.toml"
    path.write_text(LEAST + training)
    return load_config(path)


def _refusal(folder: Path, training: str) -> str:
    with pytest.raises(ConfigError) as refused:
        _config(folder, training)
    return str(refused.value).removeprefix(f"{folder / 'least.toml'}: ")


@pytest.mark.parametrize(
    ("training", "brought"),
    [
        ("", (0.995, 1.005, "execution", "mean_std")),
        ('objective = "gspo"', (0.9997, 1.0004, "execution", "mean_std")),
        ('objective = "grpo"', (0.8, 1.2, "execution", "mean_std")),
        ('objective = "dr_grpo"', (0.8, 1.2, "constant", "mean")),
        ('objective = "cispo"', (0.0, 5.0, "token", "mean_std")),
        ('objective = "own.py:loss"', (0.8, 1.2, "execution", "mean_std")),
        (
            'objective = "grpo"\nclip_high = 1.28\naveraging = "token"',
            (0.8, 1.28, "token", "mean_std"),
        ),
    ],
)
def test_an_objective_brings_its_defaults_and_a_key_replaces_one(
    tmp_path: Path, training: str, brought: Brought
) -> None:
    config = _config(tmp_path, training)
    chosen = config.training
    assert (chosen.clip_low, chosen.clip_high, chosen.averaging, chosen.advantage) == brought
    assert parse_resolved(resolved_json(config)) == config
    assert objective_warnings(chosen) == []


def test_the_file_of_an_own_objective_starts_at_the_folder_of_the_config(tmp_path: Path) -> None:
    config = _config(tmp_path, 'objective = "own.py:loss"')
    assert config.training.objective == f"{tmp_path}/own.py:loss"


@pytest.mark.parametrize(
    ("training", "words"),
    [
        (
            'objective = "ppo"',
            'training.objective = "ppo": expected one of gspo_paper, gspo, grpo, dr_grpo, cispo, '
            "file.py:function or module:function",
        ),
        (
            "averaging_tokens = 100",
            "training.averaging_tokens = 100: expected it beside training.averaging = "
            '"constant"; it is "execution"',
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    tmp_path: Path, training: str, words: str
) -> None:
    assert _refusal(tmp_path, training) == words


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ('old = "step"\nclip_low = 0.9', "the ratio is 1"),
        ("max_token_weight = 2.0", "the weight is 1"),
        ('objective = "dr_grpo"\nadvantage = "mean_std"', 'training.advantage = "mean_std" brings'),
        ('objective = "dr_grpo"\naveraging = "token"', 'training.averaging = "token" brings'),
    ],
)
def test_keys_that_do_less_than_they_say_are_told(
    tmp_path: Path, training: str, words: str
) -> None:
    config = _config(tmp_path, training)
    (line,) = objective_warnings(config.training)
    assert line in config_warnings(config)
    assert words in line
    assert "\n" not in line
