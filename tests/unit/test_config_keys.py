"""Every key is described, and read by some part of the program."""

import ast
from pathlib import Path

import pytest

from opengyre.config.keys import Key, known_keys, walk
from opengyre.config.root import RunConfig

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "opengyre"
READERS = ("runtime", "cli")


def attributes_read() -> set[str]:
    """Names after a dot in the folders that hand settings to the parts."""
    files = [path for folder in READERS for path in (PACKAGE / folder).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("key", list(walk(RunConfig)), ids=lambda key: key.path)
def test_the_key_says_what_it_means(key: Key) -> None:
    assert key.field.description


def test_no_key_is_left_unread() -> None:
    names = attributes_read()
    unread = {key for key in known_keys(RunConfig) if key.rsplit(".", 1)[-1] not in names}
    assert not unread
