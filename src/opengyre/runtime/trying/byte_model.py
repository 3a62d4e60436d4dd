"""A tokenizer of single bytes in the Qwen3 chat format, for runs that have no model.

Owns: writing the two files that a renderer reads. Invariant: any text encodes and decodes exactly.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    *("<think>", "</think>"),
    *("<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and the chat format's markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def write_byte_model(folder: Path) -> Path:
    """Make `folder` a model folder without weights; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder
