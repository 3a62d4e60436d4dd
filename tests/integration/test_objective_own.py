"""An own objective is tried in a process of its own before a run, and then trains."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_rig import EXAMPLE, make_trails

from opengyre.config.load import load_config
from opengyre.config.root import RunConfig
from opengyre.runtime.objective import loss_of
from opengyre.runtime.objective_trial import try_own_objective
from opengyre.seams.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONFIG = """
[run]
dir = "runs"
num_steps = 6
[model]
path = "model"
[[tasks]]
path = "tasks"
[training]
"""


def _config(folder: Path, training: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(CONFIG + training)
    return load_config(path)


def _own(folder: Path, code: str, function: str) -> RunConfig:
    (folder / "my_loss.py").write_text(code)
    return _config(folder, f'objective = "my_loss.py:{function}"')


def _refusal(config: RunConfig, *, trial_s: float = 60.0) -> str:
    with pytest.raises(ConfigError) as refused:
        try_own_objective(config, trial_s=trial_s)
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"training.objective = {config.training.objective}: ")
    assert line.count("training.objective") == 1
    return line


def test_the_example_of_the_page_is_tried_and_loaded(tmp_path: Path) -> None:
    (code,) = CODE.findall(PAGE.read_text())
    config = _own(tmp_path, code, "soft_gate")
    try_own_objective(config)
    loss = loss_of(config)
    assert loss.objective.__name__ == "soft_gate"
    assert (loss.settings.clip_low, loss.constant_tokens) == (0.8, config.sampling.context_tokens)


def test_a_file_that_ends_the_process_is_one_line(tmp_path: Path) -> None:
    config = _own(tmp_path, "import os\nos.kill(os.getpid(), 9)", "loss")
    assert "it ended with -9" in _refusal(config)


@pytest.mark.parametrize(
    ("code", "words"),
    [("def loss(", "cannot be loaded: SyntaxError"), ("other = 1", "has no function loss")],
)
def test_a_cell_refuses_a_file_that_cannot_be_loaded(tmp_path: Path, code: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loss_of(_own(tmp_path, code, "loss"))


def test_a_file_that_never_ends_is_given_up(tmp_path: Path) -> None:
    config = _own(tmp_path, "while True:\n    pass\n", "loss")
    assert "expected an answer for five tokens within 2 s" in _refusal(config, trial_s=2.0)


def test_a_shipped_objective_starts_no_process(tmp_path: Path) -> None:
    config = _config(tmp_path, 'objective = "cispo"\nkl_coefficient = 0.1\naveraging = "constant"')
    try_own_objective(config, trial_s=0.0)
    assert loss_of(config).kl_coefficient == 0.1


def test_a_run_with_a_broken_objective_does_not_begin(tmp_path: Path) -> None:
    trails = make_trails(tmp_path / "trails", 2)
    (tmp_path / "my_loss.py").write_text("def loss(new, trained, settings):\n    return new\n")
    sets = (f'tasks=[{{path="{trails}"}}]', f'training.objective="{tmp_path}/my_loss.py:loss"')
    result = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("gyre")), "train", str(EXAMPLE)),
            *("--run", str(tmp_path / "run")),
            *(word for one in sets for word in ("--set", one)),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("gyre: training.objective = ")
    assert "it returned Tensor" in line
    assert not (tmp_path / "run").exists()
