"""A model of no known family: each turn by its chat template, and `transformers` only for that."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.request import Call, Message, Refusal, Role
from opengyre.seams.errors import ConfigError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
USER = Message(role=Role.USER, text="hi")
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ANSWER = '<think>\nhm\n</think>\n\nSo.<tool_call>\n{"name": "n", "arguments": {}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder(tmp_path: Path, template: str) -> Path:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_each_turn_is_rendered_by_the_chat_template_and_none_extends_another(
    tmp_path: Path,
) -> None:
    renderer = load_renderer(folder(tmp_path, TEMPLATE), allow_rerender=True)
    prompt = renderer.root([USER], ())
    assert b"".join(map(renderer.token_bytes, prompt)).decode() == PROMPT
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode(ANSWER + "<|im_end|>", add_special_tokens=False).ids
    one = renderer.parser(stops=(), call_id=lambda index: f"c{index}")
    for token in ids:
        one.feed(token)
    assert one.is_stopped
    assert one.message().reasoning == "hm"
    assert one.message().text == "So."
    assert one.message().calls == (Call(call_id="c0", name="n", arguments="{}"),)
    assert renderer.extend(prompt, ids, [USER]) is None
    with pytest.raises(Refusal, match="no system"):
        renderer.root([Message(role=Role.SYSTEM, text="s"), USER], ())


def test_reasoning_that_the_template_opens_is_reasoning(tmp_path: Path) -> None:
    made = folder(
        tmp_path, TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    )
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 848]}))
    renderer = load_renderer(made, allow_rerender=True)
    assert 7 in renderer.stop_ids
    one = renderer.parser(stops=(), call_id=str)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for token in tokenizer.encode("hm</think>So.", add_special_tokens=False).ids:
        one.feed(token)
    one.finish()
    assert (one.message().reasoning, one.message().text) == ("hm", "So.")


def test_rendering_anew_needs_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        load_renderer(folder(tmp_path, ""), allow_rerender=True)


def test_a_known_family_is_read_without_transformers() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from opengyre.gateway.rendering.renderer import load_renderer\n"
        "load_renderer(Path(sys.argv[1]), allow_rerender=True)\n"
        "print('transformers' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(MODEL)], capture_output=True, text=True, timeout=60
    )
    assert found.stdout.strip() == "False", found.stderr
