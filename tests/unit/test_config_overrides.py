"""`--set a.b=c` puts one TOML value at one place, or says why it cannot."""

from typing import Any

import pytest

from opengyre.config.overrides import apply_override, parse_value
from opengyre.seams.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("1e-3", 1e-3),
        ("true", True),
        ('"8"', "8"),
        ("[1, 2]", [1, 2]),
        ("plain", "plain"),
        ("a/b.toml", "a/b.toml"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_a_value_is_toml_or_else_a_bare_string(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_tables_on_the_way_are_made_and_later_overrides_win() -> None:
    table: dict[str, Any] = {"tasks": [{"path": "a"}]}
    for override in ("x.y=1", "x.y=2", "tasks[0].path=b", "x.z=k=v"):
        apply_override(table, override)
    assert table == {"tasks": [{"path": "b"}], "x": {"y": 2, "z": "k=v"}}


@pytest.mark.parametrize("override", ["x", "=1", "a..b=1", "a b=1", "tasks[1].path=b", "n.m=1"])
def test_a_place_that_is_not_there_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"tasks": [{"path": "a"}], "n": 1}, override)
