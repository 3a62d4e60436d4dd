"""Plays quickstart tasks with a model in this process: the warm start's own measure.

Owns batched sampling on a plain Qwen3ForCausalLM over simulated shells. It is slow and simple on
purpose; the product's engine is elsewhere and gives the same tokens' probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from chat import Conversation, RendererTokenizer, make_renderer
from families import Task, score
from simulated_shell import SimulatedShell
from transformers import DynamicCache, Qwen3ForCausalLM

MAX_TURNS = 24
MAX_NEW_TOKENS = 24
MAX_TOKENS = 560


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one play gave."""

    family: str
    reward: float
    num_turns: int
    num_tokens: int
    seconds: float


@torch.no_grad()
def sample_turns(
    model: Qwen3ForCausalLM, prompts: list[list[int]], end_id: int, generator: torch.Generator
) -> list[list[int]]:
    """One completion per prompt at temperature 1, each ending with `end_id` or at the limit."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[end_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    completions: list[list[int]] = [[] for _ in prompts]
    is_open = [True] * len(prompts)
    for _ in range(MAX_NEW_TOKENS):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            logits_to_keep=1,
        )
        chances = output.logits[:, -1].float().softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator)
        for row, token in enumerate(drawn[:, 0].tolist()):
            if is_open[row]:
                completions[row].append(token)
                is_open[row] = token != end_id
        if not any(is_open):
            break
        ids, positions = drawn, positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(drawn)], dim=1)
    return completions


def play_all(
    model: Qwen3ForCausalLM,
    tokenizer: RendererTokenizer,
    tasks: list[Task],
    *,
    seed: int,
    turn_s: float = 0.15,
) -> list[Played]:
    """Play every task once, all side by side, turn by turn."""
    generator = torch.Generator().manual_seed(seed)
    renderer = make_renderer(tokenizer)
    chats = [Conversation(renderer, tokenizer, task.instruction) for task in tasks]
    shells = [SimulatedShell(task, turn_s=turn_s) for task in tasks]
    num_turns = [0] * len(tasks)
    live = list(range(len(tasks)))
    for _ in range(MAX_TURNS):
        if not live:
            break
        prompts = [chats[index].prompt_ids for index in live]
        turns = sample_turns(model, prompts, tokenizer.eos_token_id, generator)
        going = []
        for index, completion in zip(live, turns, strict=True):
            num_turns[index] += 1
            chats[index].add_completion(completion)
            command = chats[index].command()
            if command is None or len(chats[index].ids) >= MAX_TOKENS:
                continue
            chats[index].answer(shells[index].run(command))
            going.append(index)
        live = going
    return [
        Played(
            family=task.family,
            reward=score(task, shell.out),
            num_turns=turns_taken,
            num_tokens=len(chat.ids),
            seconds=shell.now_s,
        )
        for task, shell, chat, turns_taken in zip(tasks, shells, chats, num_turns, strict=True)
    ]


def mean_reward(played: list[Played], family: str | None = None) -> float:
    rewards = [play.reward for play in played if family in (None, play.family)]
    return sum(rewards) / len(rewards)
