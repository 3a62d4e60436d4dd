"""Every family of the table with a vocabulary made for it: the quickstart's and its own markers.

Invariant: nothing of it is downloaded.
"""

from functools import cache
from typing import Any

from renderers.configs import config_from_name
from tokenizers import AddedToken, Tokenizer

from checks.families import VOCABULARY, AskedFor, renderer_class
from opengyre.gateway.rendering.families import FAMILIES, Family
from opengyre.gateway.rendering.renderer import ModelRenderer, make_renderer
from opengyre.gateway.rendering.tokenizer import TokenizerAdapter

NAMES = [family.name for family in FAMILIES]


def family_of(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    family, asked = family_of(name), AskedFor()
    renderer_class(family)(asked)
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
    config = type(config_from_name(name))(thinking_retention="all")
    return renderer_class(family_of(name))(adapter_of(name), config)
