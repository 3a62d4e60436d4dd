"""Any model folder with a chat template, each turn rendered anew.

Owns: the way out for families that cannot be extended. Must not know: sessions, engines.
`transformers` is imported with this module, which is therefore imported only when it is needed.
Reasoning and calls are seen where they are marked by single `<think>` and `<tool_call>` tokens.
"""

from pathlib import Path
from typing import Any

import transformers
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from tokenizers import Tokenizer

from opengyre.gateway.families import Family, Stream
from opengyre.gateway.markers import read_markers
from opengyre.gateway.rendering import ModelRenderer
from opengyre.gateway.tokenizer import TokenizerAdapter
from opengyre.seams.errors import ConfigError

_FAMILY = Family(name="default", model_types=(), stream=Stream.ARGUMENTS, keeps_arguments=True)


def load_rerenderer(folder: Path, tokenizer: Tokenizer) -> ModelRenderer:
    """Raises ConfigError when the folder has no chat template."""
    model: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    if not model.chat_template:
        raise ConfigError(f"{folder}: no chat template, so its turns cannot be rendered")
    renderer: Any = DefaultRenderer(model, DefaultRendererConfig())
    markers = read_markers(_FAMILY, tokenizer, renderer, is_lenient=True)
    adapter = TokenizerAdapter(tokenizer, name=str(folder))
    return ModelRenderer(renderer, _FAMILY, adapter=adapter, markers=markers)
