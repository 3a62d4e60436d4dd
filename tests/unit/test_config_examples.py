"""Every example config is read by the real loader."""

from pathlib import Path

import pytest

from opengyre.config.load import load_config
from opengyre.config.root import config_warnings

REPOSITORY = Path(__file__).resolve().parents[2]
# a task.toml describes a task, these are scenarios; every other TOML is a run's config
SCENARIOS = (REPOSITORY / "examples" / "small.toml", *REPOSITORY.glob("examples/paper/*.toml"))
EXAMPLES = sorted(
    p
    for p in (REPOSITORY / "examples").rglob("*.toml")
    if p.name != "task.toml" and p not in SCENARIOS
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_the_example_is_a_config_without_warnings(path: Path) -> None:
    assert config_warnings(load_config(path)) == []


def test_the_quickstart_sees_every_training_task_once_in_a_burst() -> None:
    config = load_config(REPOSITORY / "examples" / "quickstart" / "quickstart.toml")
    assert config.schedule.groups_per_step * config.schedule.steps_per_burst == 32
    assert config.topology.num_slots >= 32
    assert config.run.num_steps % config.schedule.steps_per_burst == 0
