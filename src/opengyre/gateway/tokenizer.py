"""A model folder's tokenizer, as `renderers` wants it.

Owns: reading `tokenizer.json` and the chat template. Must not know: families, messages, and
`transformers` (its import would dominate the start).
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from opengyre.seams.errors import ConfigError

_MAX_CACHED_CHARS = 4096


class TokenizerAdapter:
    """A `tokenizers.Tokenizer` in the shape that `renderers` asks for."""

    def __init__(
        self, tokenizer: Tokenizer, *, name: str, end_of_turn: str = "", chat_template: str = ""
    ) -> None:
        self.name_or_path = name
        self.chat_template = chat_template
        self.eos_token_id: int | None = tokenizer.token_to_id(end_of_turn)
        self.unk_token_id: int | None = None
        self._tokenizer = tokenizer
        self._encode_short = lru_cache(maxsize=4096)(self._encode)

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
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


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
