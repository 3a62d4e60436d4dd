"""A model folder's tokenizer, as `renderers` wants it.

Owns: reading `tokenizer.json` and the chat template. Must not know: families, messages, and
`transformers` (its import would dominate the start). Invariant: text that was `quoted` gives no
special token, whatever it spells, and decodes to itself.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from opengyre.seams.errors import ConfigError

_MAX_CACHED_CHARS = 256
_SHORT_CHARS = 4096
_SLICE_CHARS = 2**18
_BREAK = "\ufdd0"  # no character: text has none, and what it stands between is encoded apart


class TooManyIdsError(Exception):
    """Of a text that is longer than what any prompt may be; `args[0]` ids were counted."""


class TokenizerAdapter:
    """A `tokenizers.Tokenizer` in the shape that `renderers` asks for.

    `is_encoder` False: another one encodes what is rendered, and nothing can be quoted. `encode`
    raises TooManyIdsError for a text of more than `max_text_ids`, soon after that many.
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
        self.max_text_ids = 2**31
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
        ids: list[int] = []
        for part in text.split(_BREAK):
            for piece in _slices(part):
                ids += self._ids(piece)
                if len(ids) > self.max_text_ids:
                    raise TooManyIdsError(len(ids))
        return tuple(ids)

    def _ids(self, text: str) -> list[int]:
        """Of a long text without holding up other threads, which costs a short one too much."""
        if len(text) <= _SHORT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _slices(text: str) -> Iterator[str]:
    """A very long text in slices that end with a line, or a word, if they can."""
    start = 0
    while len(text) - start > _SLICE_CHARS:
        limit = start + _SLICE_CHARS
        end = text.rfind("\n", start, limit) + 1 or text.rfind(" ", start, limit)
        end = end if end > start else limit
        yield text[start:end]
        start = end
    yield text[start:]


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
