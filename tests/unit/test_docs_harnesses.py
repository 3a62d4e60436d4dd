"""The page on harnesses says what the profiles say."""

import re
from pathlib import Path

from opengyre.config.base import SHIPPED_HARNESSES
from opengyre.config.harness_profile import PLACEHOLDERS, load_profile

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
ROW = re.compile(r"^\| `([\w-]+)` \| .* \| (.*) \|$", re.MULTILINE)


def test_the_profile_on_the_page_is_read(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "page.toml"
    path.write_text(next(block for block in blocks if "[launch]" in block))
    profile = load_profile(str(path))
    assert [rule.role for rule in profile.labels] == ["sub-agent", "side"]
    assert profile.launch.files[0].path == ".our-agent/config.toml"


def test_the_table_has_every_shipped_profile_with_the_roles_it_tells() -> None:
    rows = dict(ROW.findall(PAGE.read_text()))
    assert sorted(rows) == list(SHIPPED_HARNESSES)
    for name, roles in rows.items():
        told = {"main", *(rule.role for rule in load_profile(name).labels)}
        assert set(roles.split(", ")) == told


def test_every_placeholder_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert [name for name in PLACEHOLDERS if f"`{{{name}}}`" not in text] == []
