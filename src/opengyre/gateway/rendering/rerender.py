"""Any model folder with a chat template, each turn rendered anew.

Owns: the way out for families that cannot be extended. Must not know: sessions, engines.
`transformers` is imported with this module, which is therefore imported only when it is needed.
Reasoning and calls are seen where they are marked by single `<think>` and `<tool_call>` tokens.
"""

from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from tokenizers import Tokenizer

from opengyre.gateway.rendering.families import Family, Stream
from opengyre.gateway.rendering.markers import read_markers
from opengyre.gateway.rendering.renderer import ModelRenderer
from opengyre.gateway.rendering.tokenizer import TokenizerAdapter, read_json
from opengyre.seams.errors import ConfigError

_FAMILY = Family(name="default", stream=Stream.ARGUMENTS, keeps_arguments=True)


class _Template(DefaultRenderer):  # type: ignore[misc]  # renderers ships no types
    """The folder's chat template. What it refuses is refused as the other renderers do."""

    def __init__(self, tokenizer: Any, ends: list[int]) -> None:
        super().__init__(tokenizer, DefaultRendererConfig())
        self._ends = ends

    def render_ids(self, messages: Any, **more: Any) -> list[int]:
        try:
            return list(super().render_ids(messages, **more))
        except TemplateError as error:
            raise ValueError(f"its chat template says: {error}") from error

    def get_stop_token_ids(self) -> list[int]:
        return [*super().get_stop_token_ids(), *self._ends]


def load_rerenderer(folder: Path, tokenizer: Tokenizer) -> ModelRenderer:
    """Raises ConfigError when the folder has no chat template, or no tokenizer that can be read."""
    try:
        model: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: not a tokenizer transformers can read: {error}") from error
    if not model.chat_template:
        raise ConfigError(f"{folder}: no chat template, so its turns cannot be rendered")
    renderer: Any = _Template(model, _ends(folder / "generation_config.json"))
    markers = read_markers(_FAMILY, tokenizer, renderer, is_lenient=True)
    adapter = TokenizerAdapter(tokenizer, name=str(folder), is_encoder=False)
    return ModelRenderer(renderer, _FAMILY, adapter=adapter, markers=markers)


def _ends(path: Path) -> list[int]:
    """The ids that end an answer besides the tokenizer's own."""
    ends = read_json(path).get("eos_token_id") if path.is_file() else None
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
