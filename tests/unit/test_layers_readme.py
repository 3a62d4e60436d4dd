"""What README.md and AGENTS.md say of the tree is what is there."""

import re
from pathlib import Path

from checks import layers

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
AGENTS = (REPOSITORY / "AGENTS.md").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def test_the_readmes_tree_lists_every_folder_of_the_package_and_no_other() -> None:
    listed = set(re.findall(r"^  (\w+)/ ", README, re.MULTILINE))
    package = REPOSITORY / "src" / "opengyre"
    on_disk = {path.parent.name for path in package.glob("*/__init__.py")}
    assert listed == on_disk


def test_agents_names_every_layer_and_stays_short() -> None:
    table = AGENTS.split("## Layers")[1].split("## Never")[0]
    assert [folder for folder in layers.RANKS if folder not in table] == []
    assert len(AGENTS.splitlines()) <= 120


def test_every_make_target_in_the_docs_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README + AGENTS))
    targets = set(re.findall(r"^([a-z][a-z -]*):", MAKEFILE, re.MULTILINE))
    assert named <= {word for target in targets for word in target.split()}
