"""The page docs/rewards.md runs, and prints what stands on it; its config loads."""

import re
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from opengyre.config.reward import RewardConfig
from opengyre.runtime.rewards import load_transforms
from opengyre.trajectory.shaping import SAMPLE_STATS, ExecutionStats

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
BLOCK = re.compile(r"^```(python|text|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE.read_text())


def test_the_code_of_the_page_prints_what_the_page_says() -> None:
    world: dict[str, object] = {"__name__": "page"}
    printed, compared = "", 0
    for kind, text in BLOCKS:
        if kind == "python":
            out = StringIO()
            with redirect_stdout(out):
                exec(compile(text, str(PAGE), "exec"), world)
            printed = out.getvalue()
        elif kind == "text":
            assert printed == text
            compared += 1
    assert compared == 1


def test_the_config_of_the_page_loads_its_function_from_a_file(tmp_path: Path) -> None:
    (toml,) = (text for kind, text in BLOCKS if kind == "toml")
    source = next(text for kind, text in BLOCKS if kind == "python")
    (tmp_path / "price.py").write_text(source)
    config = RewardConfig.model_validate(
        tomllib.loads(toml)["reward"], strict=False, context={"folder": tmp_path}
    )
    mine, form, length = load_transforms(config)
    assert mine.apply(1.0, SAMPLE_STATS) == 1.0 - 0.1 * 4 / 1
    assert form.apply(1.0, SAMPLE_STATS) == 1.0 - 0.2 / 2
    assert length.apply(1.0, SAMPLE_STATS) == 1.0


def test_the_page_names_every_figure_and_no_other() -> None:
    public = {name for name in dir(ExecutionStats) if not name.startswith("_")}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.read_text(), re.MULTILINE)
    table = {name for row in rows for name in re.findall(r"\w+", row)}
    assert public <= table
    assert table - public <= {"mean_std", "mean", "leave_one_out", "mask", "drop"}
