"""The page docs/engines.md says what the code does, and its commands and files are there."""

import re
from pathlib import Path

from handoff_orders import all_orders

from opengyre.config.load import load_config
from opengyre.config.root import RunConfig
from opengyre.config.sections import EngineConfig
from opengyre.engines.torch_engine.imports import TRY_AGAIN_AFTER
from opengyre.engines.torch_engine.model import MODEL_TYPES
from opengyre.seams.kv import HandoffStage
from opengyre.store.observations import Handoff
from opengyre.views.check_handoffs import HandoffChecks
from opengyre.views.handoffs import handoff_cells, handoff_words
from opengyre.views.run_state import RunState

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text()
MEASURED = (ROOT / "benchmarks" / "README.md").read_text()
EXAMPLE = (ROOT / "examples" / "scripted.toml").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(beginning: str) -> str:
    found: list[str] = [one for one in BLOCKS if one.startswith(beginning)]
    assert len(found) == 1, beginning
    return found[0]


def commands(page: str) -> set[str]:
    """Whole commands of the two benchmarks, inside a line or of their own."""
    return set(re.findall(r"python benchmarks/(?:engines|moves)\.py [ \w,-]+", page))


def test_the_settings_load_and_are_the_defaults(tmp_path: Path) -> None:
    engine, _, topology = block("[engine]").partition("[topology]\n")
    text = EXAMPLE.replace("[topology]\n", f"[topology]\n{topology}") + engine
    (tmp_path / "page.toml").write_text(text)
    chosen = load_config(tmp_path / "page.toml").engine
    told = re.findall(r"^(\w+) =", engine, re.MULTILINE)
    assert told == ["kv_handoff", "kv_lease_s", "kv_handoff_idle"]
    default = EngineConfig()
    assert all(getattr(chosen, name) == getattr(default, name) for name in told)
    assert "at most 30\n" in engine
    assert any(getattr(one, "le", 0) == 30 for one in EngineConfig.model_fields[told[1]].metadata)


def test_every_key_exists() -> None:
    keys = re.findall(r"`(engine|topology|sampling|model)\.(\w+)(?: = [^`]+)?`", PAGE)
    assert len(set(keys)) > 7
    for section, name in keys:
        fields = RunConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        assert name in fields, f"{section}.{name}"


def test_the_columns_are_those_of_gyre_run_show_and_each_is_explained() -> None:
    names = list(handoff_cells(_state())[0])
    assert block("kept by").splitlines()[0].split() == " ".join(names).split()
    table = PAGE.partition("\n| column |")[2].partition("\n\n")[0]
    told = [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line)]
    assert set(told) - {"verify"} == set(names) - {"kept by"}


def test_the_lines_are_those_of_gyre_run_verify() -> None:
    lines = block("P6").splitlines()
    read, ended = HandoffChecks().finish(RunState())
    assert lines[0].startswith(f"P6  pass  {read.words} (")
    assert lines[1].startswith(f"P16 pass  {ended.words} (")
    (words,) = handoff_words(_state())
    assert re.sub(r"\d+", "0", lines[2].strip()) == re.sub(r"\d+", "0", words)


def test_the_numbers_and_models_are_those_of_the_code() -> None:
    assert TRY_AGAIN_AFTER == 8
    assert "the next one after eight that would be recomputed" in PAGE
    assert f"all {len(all_orders()):,} orders" in PAGE
    assert f"{len(all_orders()):,} of them" in (ROOT / "docs" / "proof.md").read_text()
    assert all(name in PAGE.lower() for name in MODEL_TYPES)
    assert all(one.name in PAGE for one in HandoffStage)


def test_the_figures_name_the_commands_that_make_them_with_options_that_are_there() -> None:
    told = commands(PAGE.partition("## Figures")[2])
    assert told == commands(MEASURED)
    assert len(told) == 7
    for command in told:
        script = (ROOT / command.split()[1]).read_text()
        assert all(f'"{flag}"' in script for flag in re.findall(r"--[\w-]+", command)), command


def test_links_and_files_exist() -> None:
    for link, _, anchor in re.findall(r"\]\(([^)#]+)(#?)([^)]*)\)", PAGE):
        page = ROOT / "docs" / link
        assert page.exists(), link
        assert not anchor or f"# {anchor.replace('-', ' ')}" in page.read_text().lower(), anchor
    for path in re.findall(r"`((?:tests|src)/[\w/*.]+)`", PAGE):
        assert list(ROOT.glob(path)), path
    tests = {one.name for one in (ROOT / "tests").glob("*/test_*.py")}
    assert [one for one in re.findall(r"`(test_\w+\.py)`", PAGE) if one not in tests] == []
    for part in re.findall(r"`(_\w+)`", PAGE):
        assert f"test_kv_handoff{part}.py" in tests


def _state() -> RunState:
    state = RunState()
    state.handoffs["kv1"] = [
        Handoff(
            ref="kv1",
            stage=HandoffStage.RELEASED,
            execution="e1",
            turn="t1",
            from_engine="c1",
            version=0,
            num_tokens=8,
        )
    ]
    return state
