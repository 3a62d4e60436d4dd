"""docs/objectives.md says what the config does, shows what the benchmark prints, and its example
works."""

import re
from pathlib import Path

from benchmarks.objectives import table
from opengyre.config.objectives import OBJECTIVE_DEFAULTS
from opengyre.trainer.objectives.signature import ObjectiveSettings
from opengyre.trainer.objectives.trial import try_objective

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_table_of_defaults_is_the_configs() -> None:
    text = PAGE.read_text()
    for name, own in OBJECTIVE_DEFAULTS.items():
        cells = (f"`{name}`", f"{own.clip_low:g}", f"{own.clip_high:g}", own.averaging)
        assert "| " + " | ".join((*cells, own.advantage)) + " |" in text


def test_the_shares_of_cut_tokens_are_what_the_benchmark_prints() -> None:
    assert "\n".join(table()) in PAGE.read_text()


def test_the_example_of_an_own_objective_passes_the_trial() -> None:
    (code,) = EXAMPLE.findall(PAGE.read_text())
    world: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), world)
    try_objective(world["soft_gate"], ObjectiveSettings(), name="soft_gate")  # type: ignore[arg-type]
