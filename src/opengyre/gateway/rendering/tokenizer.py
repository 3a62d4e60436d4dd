"""A model folder's tokenizer, as `renderers` wants it.

Owns: reading `tokenizer.json` and the chat template. Must not know: families, messages, and
`transformers` (its import would dominate the start). Invariant: text that was `quoted` gives no
special token, whatever it spells, and decodes to itself.
"""

import re
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from opengyre.seams.errors import ConfigError

_MAX_CACHED_CHARS = 4096
_BREAK = "\ufdd0"  # no character: text has none, and what it stands between is encoded apart


class TokenizerAdapter:
    """A `tokenizers.Tokenizer` in the shape that `renderers` asks for.

    `is_encoder` False: another one encodes what is rendered, and nothing can be quoted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str,
        end_of_turn: str = "",
        chat_template: str = "",
        is_encoder: bool = True,
    ) -> None:
        self.name_or_path = name
        self.chat_template = chat_template
        self.eos_token_id: int | None = tokenizer.token_to_id(end_of_turn)
        self.unk_token_id: int | None = None
        self._tokenizer = tokenizer
        self._encode_short = lru_cache(maxsize=4096)(self._encode)
        spelled = [one.content for one in tokenizer.get_added_tokens_decoder().values()]
        words = sorted((re.escape(one) for one in spelled if len(one) > 1), reverse=True)
        self._spelled = re.compile("|".join(words)) if words and is_encoder else None

    def quoted(self, text: str) -> str:
        """For `encode`: `text` of someone who may not open or end a turn, a call, reasoning."""
        if self._spelled is None:
            return text
        whole = text.replace(_BREAK, "")
        return self._spelled.sub(lambda found: f"{found[0][0]}{_BREAK}{found[0][1:]}", whole)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if len(text) > _MAX_CACHED_CHARS:
            return list(self._encode(text))
        return list(self._encode_short(text))

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def _encode(self, text: str) -> tuple[int, ...]:
        parts = text.split(_BREAK)
        encoded = [self._tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
        return tuple(chain.from_iterable(encoded))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Raises ConfigError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not found; a model folder needs its tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for a damaged file
        raise ConfigError(f"{path}: not a readable tokenizer ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError unless the file is there and holds an object."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: cannot be read as a JSON object ({error})") from error


def read_chat_template(folder: Path) -> str:
    """The Jinja text that came with the model, the default one of several, "" if none did.

    Raises ConfigError for a file that cannot be read.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        told = read_json(path).get("chat_template") if path.is_file() else None
        several = {one["name"]: one["template"] for one in told} if isinstance(told, list) else {}
        template = several.get("default", told)
        if isinstance(template, str):
            return template
    return ""
