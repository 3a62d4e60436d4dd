"""Token ids to text in increments that never cut a character.

Owns: the bytes behind each id of a byte-level or byte-fallback vocabulary. Must not know: what the
text means. Invariant: the increments of any split of the same ids join to what the tokenizer
decodes (where that is no UTF-8, a byte-fallback tokenizer writes more U+FFFD than we do).
"""

import codecs
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from opengyre.seams.errors import ConfigError

_UNKNOWN = 0x100  # no byte
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each id, added tokens as their own text. Raises ConfigError for a vocabulary
    whose ids do not stand for bytes."""
    steps = _decoder_steps(tokenizer)
    if "ByteLevel" in steps:
        of_token = _of_byte_level
    elif "ByteFallback" in steps:
        of_token = _of_byte_fallback
    else:
        raise ConfigError(f"the tokenizer decodes by {steps or 'nothing'}, not by bytes")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    for token, number in vocabulary.items():
        table[number] = of_token(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        table[number] = added.content.encode()
    return table


class TextDecoder:
    """Feeds on ids, gives text; bytes of an unfinished character wait for the next id."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Ids outside the vocabulary have no text."""
        known = self._table[token] if 0 <= token < len(self._table) else b""
        return self._decoder.decode(known)

    def feed_all(self, tokens: Sequence[int]) -> str:
        table, num = self._table, len(self._table)
        return self._decoder.decode(b"".join([table[t] for t in tokens if 0 <= t < num]))

    def flush(self) -> str:
        """What is left, an unfinished character as U+FFFD; then starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _of_byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTES_BY_CHAR).encode("latin-1")
    except UnicodeEncodeError:
        return b""


def _of_byte_fallback(token: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()


def _bytes_by_char() -> dict[int, int]:
    """The byte for each printable stand-in that byte-level vocabularies are written in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = dict.fromkeys(others, _UNKNOWN) | {byte: byte for byte in printable}
    return table | {256 + k: byte for k, byte in enumerate(others)}


_BYTES_BY_CHAR = _bytes_by_char()
