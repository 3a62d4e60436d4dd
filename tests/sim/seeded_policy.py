"""What a scripted policy answers in a seeded world, so that everyone can know each token.

Owns: the answer to a user's message, as text and as ids. Invariants: it depends on the message
alone; no two neighbouring characters are equal, so a lost or repeated token changes the text.
"""

import random
import re
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from opengyre.engines.scripted import Respond, text_policy
from opengyre.gateway.rendering.renderer import ModelRenderer, load_renderer
from opengyre.gateway.rendering.tokenizer import TokenizerAdapter

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
END_OF_TURN = "<|im_end|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
MAX_LETTERS = 14
_LAST_USER = re.compile(r".*<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


@cache
def tokenizer() -> TokenizerAdapter:
    found = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return TokenizerAdapter(found, name=str(MODEL), end_of_turn=END_OF_TURN)


@cache
def renderer() -> ModelRenderer:
    return load_renderer(MODEL)


@cache
def answer_to(message: str) -> str:
    """The whole answer to a conversation whose last user message is `message`."""
    rng = random.Random(f"answer/{message}")
    place, letters = rng.randrange(len(LETTERS)), []
    for _ in range(rng.randint(3, MAX_LETTERS)):
        place = (place + rng.randrange(1, len(LETTERS))) % len(LETTERS)
        letters.append(LETTERS[place])
    return "".join(letters)


@cache
def ids_of_answer(message: str) -> tuple[int, ...]:
    """Its tokens, the end of the turn included."""
    return (*tokenizer().encode(answer_to(message)), *tokenizer().encode(END_OF_TURN))


def text_of_answer(message: str, max_new_tokens: int) -> tuple[str, bool]:
    """What a client sees of it, and whether it is cut."""
    ids = ids_of_answer(message)
    if max_new_tokens >= len(ids):
        return answer_to(message), False
    return tokenizer().decode(list(ids[:max_new_tokens])), True


@cache
def respond() -> Respond:
    def respond_text(text: str, seed: int) -> str:
        found = _LAST_USER.match(text)
        if found is None:
            raise ValueError("no user message")
        return answer_to(found.group(1))

    return text_policy(tokenizer(), respond_text)
