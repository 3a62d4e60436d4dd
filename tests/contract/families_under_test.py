"""Every family of the table with a vocabulary made for it: the quickstart's and its own markers.

Owns: finding out which tokens a renderer asks for. Invariant: nothing of it is downloaded.
"""

from functools import cache
from pathlib import Path
from typing import Any

import renderers
from renderers.configs import config_from_name
from tokenizers import AddedToken, Tokenizer

from opengyre.gateway.families import FAMILIES, Family
from opengyre.gateway.rendering import ModelRenderer, make_renderer
from opengyre.gateway.tokenizer import TokenizerAdapter

VOCABULARY = Path(__file__).parents[2] / "examples" / "quickstart" / "model" / "tokenizer.json"
NAMES = [family.name for family in FAMILIES]


class _Asked(TokenizerAdapter):
    """Has every token that is asked for."""

    def __init__(self) -> None:
        super().__init__(Tokenizer.from_file(str(VOCABULARY)), name="asked")
        self.tokens: dict[str, int] = {}

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.tokens.setdefault(tokens, 100_000 + len(self.tokens))

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if text[:1] in ("<", "\uff5c") and text[-1:] in (">", "\uff5c"):
            return [self.convert_tokens_to_ids(text)]
        return super().encode(text)


def family_of(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    kind = type(config_from_name(name))
    asked = _Asked()
    getattr(renderers, kind.__name__.removesuffix("Config"))(asked, kind())
    family = family_of(name)
    markers = [*(family.reasoning or ()), *(family.call or ()), *family.silent]
    tokenizer = Tokenizer.from_file(str(VOCABULARY))
    tokens = sorted({*asked.tokens, *markers})
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    return tokenizer


@cache
def adapter_of(name: str) -> TokenizerAdapter:
    return TokenizerAdapter(tokenizer_of(name), name=name)


@cache
def renderer_of(name: str) -> ModelRenderer:
    return make_renderer(family_of(name), tokenizer_of(name), adapter_of(name))


@cache
def reference_of(name: str) -> Any:
    """The same renderer of `renderers`, to be asked directly."""
    kind = type(config_from_name(name))
    config = kind(thinking_retention="all")
    return getattr(renderers, kind.__name__.removesuffix("Config"))(adapter_of(name), config)
