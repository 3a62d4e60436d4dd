"""Which family a model folder is, what is refused, and the page that says so."""

import json
import shutil
from pathlib import Path

import pytest
import renderers.base

from checks.families import PAGE, page
from opengyre.gateway.rendering.families import FAMILIES, LEFT_OUT, find_family
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.rendering.tokenizer import read_chat_template
from opengyre.seams.errors import ConfigError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def folder(tmp_path: Path, *, name: str = "model", template: str = "", **config: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    shutil.copy(MODEL / "tokenizer.json", made)
    (made / "config.json").write_text(json.dumps(config))
    if template:
        (made / "chat_template.jinja").write_text(template)
    return made


def test_every_renderer_is_in_the_table_or_left_out_with_a_reason() -> None:
    renderers.base._populate_registry()
    known = set(renderers.base.RENDERER_REGISTRY)
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    assert set(names) | set(LEFT_OUT) == known | {"custom", "auto"}
    assert not set(names) & set(LEFT_OUT)


def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m checks.families"


@pytest.mark.parametrize(
    ("model_type", "name", "template", "found"),
    [
        ("qwen3", "", "", "qwen3"),
        ("qwen3", "prime-qwen3", "<function=", "prime-qwen3"),
        ("qwen3_moe", "qwen3.5", "", "qwen3"),  # a name of another type says nothing
        ("qwen3_5", "", "enable_thinking", "qwen3.5"),
        ("qwen3_5", "", "preserve_thinking", "qwen3.6"),
        ("qwen3_5_moe", "", "preserve_thinking reasoning_effort", "qwen3.8"),
        ("qwen3_5", "qwen3.5", "preserve_thinking", "qwen3.5"),
        ("glm4_moe", "", "", "glm-4.5"),
        ("glm4_moe", "", "clear_thinking", "glm-5"),
        ("glm_moe_dsa", "glm-5", "", "glm-5"),
        ("deepseek_v3", "", "'<｜Assistant｜><think>\\n'", "deepseek-r1"),  # noqa: RUF001
        ("deepseek_v3", "", "'<｜Assistant｜>'", "deepseek-v3"),  # noqa: RUF001
        ("llama", "", "<|start_header_id|>", "llama-3"),
        ("gemma4", "", "", "gemma4"),
    ],
)
def test_a_model_is_told_by_its_type_then_its_name_then_its_template(
    model_type: str, name: str, template: str, found: str
) -> None:
    assert find_family(model_type, name=name, template=template).name == found


@pytest.mark.parametrize(
    ("model_type", "template", "reason"),
    [
        ("qwen3_moe", "<function=", "may be qwen3,"),  # Qwen3-Coder
        ("glm_moe_dsa", "clear_thinking", "may be glm-5, glm-5.1, glm-5.3,"),
        ("deepseek_v3", "thinking", "may be deepseek-r1, deepseek-v3,"),  # V3.1
        ("llama", "[INST]", "may be llama-3,"),
        ("nemotron_h", "", "may be nemotron-3,"),
        ("gpt_oss", "", "not supported"),
        ("", "", "not supported"),
    ],
)
def test_what_no_row_describes_is_refused(model_type: str, template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_family(model_type, name="", template=template)


def test_a_folder_named_like_a_known_model_is_that_model(tmp_path: Path) -> None:
    for named in ("Qwen3-8B", "qwen3-8b"):
        load_renderer(folder(tmp_path, name=named, template="<function=", model_type="qwen3"))
    told = {"model_type": "qwen3", "_name_or_path": "Qwen/Qwen3-8B"}
    load_renderer(folder(tmp_path, name="mine", template="<function=", **told))
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots"
    snapshot.mkdir(parents=True)
    load_renderer(folder(snapshot, name="0123", template="<function=", model_type="qwen3"))
    with pytest.raises(ConfigError, match="may be"):
        load_renderer(folder(tmp_path, name="other", template="<function=", model_type="qwen3"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chat_template.json", "preserve_thinking"),
        ("tokenizer_config.json", "preserve_thinking"),
        (
            "tokenizer_config.json",
            [
                {"name": "tool_use", "template": "other"},
                {"name": "default", "template": "preserve_thinking"},
            ],
        ),
    ],
)
def test_a_chat_template_is_found_wherever_models_keep_it(
    tmp_path: Path, name: str, told: object
) -> None:
    assert read_chat_template(tmp_path) == ""
    (tmp_path / name).write_text(json.dumps({"chat_template": told}))
    assert read_chat_template(tmp_path) == "preserve_thinking"


def test_a_tokenizer_without_the_familys_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no minimax-m2 tokenizer"):
        load_renderer(folder(tmp_path, model_type="minimax_m2"))


def test_a_damaged_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    made = folder(tmp_path, model_type="qwen3")
    (made / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model/tokenizer\.json: not a readable tokenizer"):
        load_renderer(made)
    (made / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not found"):
        load_renderer(made)
    shutil.copy(MODEL / "tokenizer.json", made)
    (made / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as a JSON object"):
        load_renderer(made)


def test_an_unknown_family_is_refused_unless_rendering_anew_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.allow_rerender = true"):
        load_renderer(folder(tmp_path, model_type="mystery"))
