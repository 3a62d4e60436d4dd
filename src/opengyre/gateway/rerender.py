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

from opengyre.gateway.families import Family, Stream
from opengyre.gateway.markers import read_markers
from opengyre.gateway.rendering import ModelRenderer
from opengyre.gateway.tokenizer import TokenizerAdapter
from opengyre.seams.errors import ConfigError


class _Template(DefaultRenderer):  # type: ignore[misc]  # renderers ships no types
    """What a chat template refuses is refused as the other renderers do."""

    def render_ids(self, messages: Any, **more: Any) -> list[int]:
        try:
            return list(super().render_ids(messages, **more))
        except TemplateError as error:
            raise ValueError(f"its chat template says: {error}") from error


_FAMILY = Family(name="default", stream=Stream.ARGUMENTS, keeps_arguments=True)


def load_rerenderer(folder: Path, tokenizer: Tokenizer) -> ModelRenderer:
    """Raises ConfigError when the folder has no chat template, or no tokenizer that can be read."""
    try:
        model: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: not a tokenizer transformers can read: {error}") from error
    if not model.chat_template:
        raise ConfigError(f"{folder}: no chat template, so its turns cannot be rendered")
    renderer: Any = _Template(model, DefaultRendererConfig())
    markers = read_markers(_FAMILY, tokenizer, renderer, is_lenient=True)
    adapter = TokenizerAdapter(tokenizer, name=str(folder))
    return ModelRenderer(renderer, _FAMILY, adapter=adapter, markers=markers)
