"""The page docs/trajectories.md names every fork, every reason and every key, with its default."""

import re
from pathlib import Path

from opengyre.config.reward import RewardConfig
from opengyre.config.schedule import ScheduleConfig
from opengyre.config.training import TrainingConfig
from opengyre.trajectory.account import DROPPING, Reason
from opengyre.trajectory.selection import SelectionSettings
from opengyre.trajectory.tree import Fork

PAGE = (Path(__file__).parents[2] / "docs" / "trajectories.md").read_text()
SECTIONS = {
    "training": TrainingConfig,
    "schedule": ScheduleConfig,
    "reward": RewardConfig,
}


def rows(first_column: str) -> list[list[str]]:
    """The cells of the table whose first column has this name."""
    table = PAGE.partition(f"\n| {first_column} |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_fork_is_explained_once() -> None:
    told = [name for row in rows("fork") for name in names(row[0])]
    assert sorted(told) == sorted(fork.value for fork in Fork)


def test_every_reason_is_explained_once_and_turns_own_reasons_are_dropped() -> None:
    table = [(name, row[1]) for row in rows("reason") for name in names(row[0])]
    assert sorted(name for name, _ in table) == sorted(reason.value for reason in Reason)
    assert {name: dict(table)[name] for name in DROPPING} == dict.fromkeys(DROPPING, "dropped")


def test_every_key_exists_and_its_default_is_the_one_that_stands_there() -> None:
    told = {names(row[0])[0]: row[1] for row in rows("key")}
    assert len(told) == 14
    for key, default in told.items():
        section, _, name = key.partition(".")
        assert name in SECTIONS[section].model_fields, key
        value = SECTIONS[section].model_fields[name].default
        match default.strip("`").strip('"'):
            case "the objective's" | "test files":
                continue
            case "none":
                assert value == ()
            case "false":
                assert value is False
            case text if isinstance(value, int | float):
                assert float(text) == value
            case text if isinstance(value, tuple):
                assert tuple(names(default)) == value
            case text:
                assert text == value
    assert SelectionSettings().max_paths == 5


def test_the_tree_that_is_printed_adds_up() -> None:
    block = PAGE.partition("  engines\n")[2].partition("```")[0].splitlines()
    cells = [re.split(r" {2,}", line.replace("|  ", "").replace("+- ", "")) for line in block]
    totals = [sum(int(row[column]) for row in cells) for column in (5, 6)]
    assert totals == [144, 102]
    assert "144 tokens sampled = 102 trained + 42 masked (42 not_selected)" in PAGE
