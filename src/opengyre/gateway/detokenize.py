"""Token ids to text in increments that never cut a character.

Owns: the bytes behind each id of a byte-level vocabulary. Must not know: what the text means.
Invariant: the increments of any split of the same ids join to what the tokenizer decodes.
"""

import codecs

from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each id of a byte-level BPE, added tokens as their own text."""
    bytes_by_char = _bytes_by_char()
    table = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number >= len(table):
            table.extend([b""] * (number + 1 - len(table)))
        known = [bytes_by_char.get(char) for char in token]
        table[number] = bytes(b for b in known if b is not None) if None not in known else b""
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

    def flush(self) -> str:
        """What is left, an unfinished character as U+FFFD; then starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _bytes_by_char() -> dict[str, int]:
    """The printable stand-in for each byte that byte-level vocabularies are written in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    table.update({chr(256 + k): b for k, b in enumerate(others)})
    return table
