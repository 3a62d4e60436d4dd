"""The page on grading: its configs are read, and it names every kind and key."""

import re
from pathlib import Path

import pytest

from opengyre.config.grading import GradingConfig
from opengyre.config.load import load_config
from opengyre.seams.tasks import GraderKind
from opengyre.tasks.workspaces import MAX_COPIED_BYTES, MAX_COPIED_FILES, MAX_DEPTH

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "grading.md").read_text()
CONFIGS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
EXAMPLE = (ROOT / "examples" / "scripted.toml").read_text()


@pytest.mark.parametrize("text", CONFIGS)
def test_each_config_on_the_page_is_one(tmp_path: Path, text: str) -> None:
    kept = EXAMPLE if "[grading]" in text else re.sub(r"\[harness\]\n(.+\n)+", "", EXAMPLE)
    (tmp_path / "page.toml").write_text(kept + "\n" + text)
    load_config(tmp_path / "page.toml")


def test_every_kind_has_a_row_and_a_config() -> None:
    for kind in GraderKind:
        assert f"| `{kind}`" in PAGE
        assert any(f'kind = "{kind}"' in text for text in CONFIGS)


def test_every_key_is_on_the_page() -> None:
    assert [name for name in GradingConfig.model_fields if name not in PAGE] == []


def test_the_bounds_are_those_of_the_code() -> None:
    assert MAX_COPIED_BYTES == 1 << 30
    assert f"{MAX_COPIED_FILES} files or 1 GiB" in PAGE
    assert f"nested deeper than {MAX_DEPTH} folders" in PAGE
