"""A scripted answer that any reader can check: letters in an order that shows each slip.

Must not know: HTTP, engines. Invariants: one letter is one token; what follows depends on the
prompt up to its last generation prompt alone, so an answer goes on the same from any point.
"""

from tokenizers import Tokenizer

from opengyre.engines.scripted import Respond
from opengyre.seams.errors import ConfigError

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def letters(first: int, num_tokens: int) -> str:
    """Every seventh letter from the alphabet's letter number `first`: a lost or repeated token
    shows in the text alone."""
    return "".join(_ALPHABET[(first + 7 * k) % 26] for k in range(num_tokens))


def letters_policy(tokenizer: Tokenizer, num_tokens: int) -> Respond:
    """Answers `letters` of `num_tokens` tokens, one letter each, the first one by the prompt. A
    prompt that holds a part of it gets the rest. Raises ConfigError for a vocabulary without
    them."""
    ids = [_id(tokenizer, letter) for letter in _ALPHABET]
    end = _id(tokenizer, "<|im_end|>")
    marker = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids

    def respond(prompt_ids: list[int], seed: int) -> list[int]:
        start = _end_of_last(marker, prompt_ids)
        first = sum(prompt_ids[:start]) % 26
        so_far = len(prompt_ids) - start
        return [ids[(first + 7 * k) % 26] for k in range(so_far, num_tokens)] + [end]

    return respond


def _end_of_last(marker: list[int], ids: list[int]) -> int:
    """Where the answer begins; the end of a prompt without a generation prompt."""
    for start in range(len(ids) - len(marker), -1, -1):
        if ids[start : start + len(marker)] == marker:
            return start + len(marker)
    return len(ids)


def _id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ConfigError(f"the tokenizer has no token {token!r}")
    return number
