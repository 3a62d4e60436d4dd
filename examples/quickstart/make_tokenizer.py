"""Trains the quickstart's small byte-level BPE on the texts its conversations are made of.

Owns the vocabulary: 256 bytes, all numbers of one or two digits, whole phrases of the two
families, and the Qwen3 markers. Everything follows from the seed.
"""

from __future__ import annotations

import random
from typing import Any

from chat import Conversation, RendererTokenizer, call_text, make_renderer
from demonstrator import DONE, NOISY, Dice, Exchange, next_command
from families import Task, draw_tasks
from simulated_shell import SimulatedShell
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from opengyre.harness.gyre_agent import MALFORMED_CALL

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
MAX_VOCABULARY = 1024
NUM_TASKS = 200
SLIPS = [
    "cat: 10: No such file or directory",
    "cat: log/10: No such file or directory",
    "no job 10",
    "bash: line 1: 10: command not found",
    MALFORMED_CALL,
    "(stopped after 30 s)",
    "exit 1",
]


class RecordingTokenizer(RendererTokenizer):
    """Notes every text it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, name="recording")
        self.texts: list[str] = []

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        self.texts.append(text)
        return super().encode(text)


def bare_tokenizer() -> Tokenizer:
    """The pipeline without any merge: bytes and markers."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,2}|[^\p{N}]+"), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Learn merges from `texts`; markers are cut out first, so that no merge crosses one."""
    for marker in MARKERS + SPECIAL:
        texts = [piece for text in texts for piece in text.split(marker) if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY - len(SPECIAL) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])


def record_play(task: Task, dice: Dice, tokenizer: RecordingTokenizer) -> None:
    """Play one task in text, so that the tokenizer notes what the renderer encodes."""
    shell, history = SimulatedShell(task), []
    chat = Conversation(make_renderer(tokenizer), tokenizer, task.instruction)
    while (command := next_command(task.instruction, history, dice)) and len(history) < 24:
        chat.write(call_text(command))
        history.append(Exchange(command=command, output=shell.run(command)))
        chat.answer(history[-1].output)
    chat.write(DONE)


def make_tokenizer(seed: int) -> Tokenizer:
    """The trained tokenizer, a function of the seed."""
    bare = bare_tokenizer()
    train(bare, [])
    recording = RecordingTokenizer(bare)
    dice = Dice(rng=random.Random(seed), mistakes=NOISY)
    for task in draw_tasks(seed, NUM_TASKS):
        record_play(task, dice, recording)
    numbers = [f"{number:02d}" for number in range(100)] * 20
    rare = [f"\n{line}\n" for line in SLIPS] * 3
    tokenizer = bare_tokenizer()
    train(tokenizer, recording.texts + numbers + rare)
    return tokenizer
