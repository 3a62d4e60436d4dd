"""The page docs/study.md shows what its script makes, and nothing is missing."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "study.md"
BLOCK = re.compile(r"<!-- (\w+): made by (\S+) -->\n(.*?)<!-- end of \1 -->", re.DOTALL)
MAX_PICTURE_BYTES = 150_000


def test_every_block_of_the_page_is_filled_and_names_its_script() -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 9
    for name, script, text in blocks:
        assert (ROOT / script).is_file()
        assert "seeds" in text, name


def test_every_picture_of_the_page_is_there_and_small() -> None:
    names = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text())
    assert len(names) == 8
    for name in names:
        assert 1_000 < (PAGE.parent / name).stat().st_size < MAX_PICTURE_BYTES
