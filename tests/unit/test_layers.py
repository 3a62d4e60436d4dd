"""The package keeps the layer table; the checks catch what breaks it."""

from collections.abc import Mapping
from pathlib import Path

from checks import folders, layers
from checks.imports import import_graph

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "opengyre"


def breaches(root: Path, files: Mapping[str, str]) -> list[str]:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, root):
            (folder / "__init__.py").touch()
        path.write_text(source)
    return layers.find_breaches(import_graph(root))


def test_the_package_keeps_the_layers() -> None:
    assert layers.find_breaches(import_graph(PACKAGE)) == []
    assert folders.find_breaches(PACKAGE) == []


def test_every_folder_of_the_package_is_in_the_table() -> None:
    on_disk = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert on_disk <= set(layers.RANKS)


def test_an_import_that_points_up_is_found(tmp_path: Path) -> None:
    found = breaches(
        tmp_path,
        {"gateway/app.py": "from opengyre.runtime import loop", "runtime/loop.py": ""},
    )
    assert found == ["opengyre.gateway.app:1: gateway may not import runtime.loop"]


def test_siblings_stay_apart_except_where_the_table_says(tmp_path: Path) -> None:
    found = breaches(
        tmp_path,
        {
            "transport/framed.py": "",
            "engines/scripted.py": "import opengyre.transport.framed",
            "engines/vllm.py": "",
            "simulate/world.py": "import opengyre.engines.scripted\nimport opengyre.engines.vllm",
            "transport/tcp.py": "import opengyre.engines.scripted",
        },
    )
    assert found == [
        "opengyre.simulate.world:2: simulate may not import engines.vllm",
        "opengyre.transport.tcp:1: transport may not import engines.scripted",
    ]


def test_views_read_the_store_and_never_write_it(tmp_path: Path) -> None:
    found = breaches(
        tmp_path,
        {
            "store/journal.py": "",
            "views/fold.py": "from opengyre.store.journal import read_journal, open_journal",
        },
    )
    assert found == [
        "opengyre.views.fold:1: views only read the store, "
        "and may not import store.journal.open_journal"
    ]


def test_the_writers_that_views_may_not_take_exist() -> None:
    for writer in layers.WRITERS:
        module, name = writer.rsplit(".", 1)
        source = PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text()
        assert f"class {name}" in source or f"def {name}" in source, writer


def test_a_pure_module_may_not_reach_a_clock_through_another(tmp_path: Path) -> None:
    found = breaches(
        tmp_path,
        {
            "control/scheduler.py": "from opengyre.control import counts",
            "control/counts.py": "def f():\n    from time import monotonic\n",
        },
    )
    assert found == [
        "opengyre.control.counts: control is pure but reaches time",
        "opengyre.control.scheduler: control is pure but reaches opengyre.control.counts -> time",
    ]


def test_numpy_is_for_trajectory_and_not_for_control(tmp_path: Path) -> None:
    found = breaches(
        tmp_path,
        {"control/a.py": "import numpy as np", "trajectory/b.py": "import numpy.linalg"},
    )
    assert found == ["opengyre.control.a: control is pure but reaches numpy"]


def test_relative_imports_are_followed_like_absolute_ones(tmp_path: Path) -> None:
    found = breaches(tmp_path, {"control/a.py": "from ..seams import b", "seams/b.py": ""})
    assert "opengyre.control.a:1: control may not import seams.b" in found


def test_a_folder_that_the_design_does_not_know_is_found(tmp_path: Path) -> None:
    found = breaches(tmp_path, {"extras/a.py": "from opengyre.seams import b", "seams/b.py": ""})
    assert any("extras is in no layer" in line for line in found)


def test_vague_names_and_filled_package_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "text.py").touch()
    (tmp_path / "__init__.py").write_text("from opengyre.seams import engine\n")
    found = folders.find_breaches(tmp_path)
    assert len(found) == 3
    assert found[0].startswith("__init__.py: must be empty")
    assert found[1].startswith("utils/text.py: name it after what it owns")
    assert found[2] == "utils/text.py: its folder has no __init__.py"
