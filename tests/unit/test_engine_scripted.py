"""The scripted engine's policy of text goes on exactly from any token, at a set speed."""

import asyncio
import time

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders

from opengyre.engines.scripted import (
    ScriptedConfig,
    ScriptedEngine,
    pseudo_logprob,
    text_policy,
)
from opengyre.seams.engine import Finish, GenerateRequest
from opengyre.transport.chunk_stream import collect

PROMPT = "<|im_start|>user\nsum 58 next 12<|im_end|>\n<|im_start|>assistant\n"


class SmallTokenizer:
    """Byte-level BPE with merges and the chat's special tokens."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = token_decoders.ByteLevel()
        marks = [AddedToken(one, special=True) for one in ("<|im_start|>", "<|im_end|>")]
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=marks,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        self._tokenizer.train_from_iterator([PROMPT, "the answer is 58 and 58 is it"], trainer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


@pytest.fixture(scope="module")
def tokenizer() -> SmallTokenizer:
    return SmallTokenizer()


def answer(text: str, seed: int) -> str:
    assert text.endswith("<|im_start|>assistant\n")
    return f"the answer is {58 + seed} after {text.count('user')} é"


def test_the_rest_of_an_answer_is_exact_after_every_token(tokenizer: SmallTokenizer) -> None:
    respond = text_policy(tokenizer, answer)
    prompt = tokenizer.encode(PROMPT)
    whole = respond(prompt, 3)
    assert tokenizer.decode(whole) == "the answer is 61 after 1 é<|im_end|>"
    for k in range(len(whole) + 1):
        assert respond(prompt + whole[:k], 3) == whole[k:]


def test_an_earlier_turn_of_the_agent_is_not_taken_for_this_one(
    tokenizer: SmallTokenizer,
) -> None:
    respond = text_policy(tokenizer, answer)
    longer = tokenizer.encode(PROMPT + "the answer is 58<|im_end|>\n" + PROMPT)
    assert "after 2" in tokenizer.decode(respond(longer, 0))


def test_a_prompt_the_policy_cannot_continue_is_an_error_chunk(tokenizer: SmallTokenizer) -> None:
    engine = ScriptedEngine(text_policy(tokenizer, answer))

    async def main(prompt: str) -> str:
        request = GenerateRequest(
            request_id="r", execution="e", prompt_ids=tokenizer.encode(prompt), max_new_tokens=5
        )
        made = await collect(engine.submit(request))
        assert made.finish is Finish.ERROR
        return made.reason

    assert "does not give" in asyncio.run(main(PROMPT + "something else"))
    assert "no generation prompt" in asyncio.run(main("hello"))


def test_each_request_runs_at_the_set_speed_beside_others() -> None:
    config = ScriptedConfig(tokens_per_s=400.0, max_running=8)
    engine = ScriptedEngine(lambda ids, seed: [1] * 80, config)

    async def main() -> float:
        started_s = time.monotonic()
        requests = [
            GenerateRequest(request_id=f"r{n}", execution="e", prompt_ids=[1], max_new_tokens=80)
            for n in range(8)
        ]
        await asyncio.gather(*(collect(engine.submit(one)) for one in requests))
        return time.monotonic() - started_s

    assert 0.15 < asyncio.run(main()) < 1.0


def test_logprobs_depend_on_seed_position_and_version_alone() -> None:
    values = {pseudo_logprob(s, p, v) for s in range(5) for p in range(50) for v in range(3)}
    assert len(values) == 5 * 50 * 3
    assert all(-2.0 < one <= 0.0 for one in values)
    assert pseudo_logprob(2**70 + 1, 4, 2) == pseudo_logprob(2**70 + 1, 4, 2)
