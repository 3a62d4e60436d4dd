"""Makes the quickstart's model: trains a tiny Qwen3 on noisy demonstrations, deterministically.

    python examples/quickstart/warm_start.py [--out FOLDER] [--seed 1] [--num-steps 460]

Owns the recipe (about three minutes on one CPU core): Muon on the matrices and AdamW on
the rest, first clean demonstrations for the mechanics, then noisy ones so that reinforcement
learning has something to remove. Writes config.json, generation_config.json, model.safetensors,
tokenizer.json, tokenizer_config.json and measured.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import fmean

import torch
from chat import END_OF_TURN, UNKNOWN, Conversation, RendererTokenizer, call_text, make_renderer
from demonstrator import CLEAN, DONE, NOISY, Dice, Exchange, next_command
from families import Task, draw_tasks
from make_tokenizer import make_tokenizer
from rollout import MAX_TURNS, Played, mean_reward, play_all
from safetensors.torch import save_file
from simulated_shell import SimulatedShell
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

TASKS_PER_STEP = 16
CLEAN_SHARE = 0.7
DECAY_SHARE = 0.3
WARM_UP_STEPS = 30
LEARNING_RATE = 4e-3
CONTEXT_WEIGHT = 0.05
FIRST_TASK_SEED = 1_000_000
TASK_SEEDS_PER_SEED = 10_000_000
HELD_OUT_SEED = 2_000_000
IGNORED = -100


def make_model(tokenizer: RendererTokenizer, num_vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=num_vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.convert_tokens_to_ids(UNKNOWN),
        attn_implementation="sdpa",
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def demonstrate(tokenizer: RendererTokenizer, task: Task, dice: Dice) -> Conversation:
    """One demonstration as tokens."""
    shell = SimulatedShell(task, turn_s=dice.rng.uniform(0.1, 0.8))
    chat = Conversation(make_renderer(tokenizer), tokenizer, task.instruction)
    history: list[Exchange] = []
    while len(history) < MAX_TURNS:
        command = next_command(task.instruction, history, dice)
        chat.write(DONE if command is None else call_text(command))
        if command is None:
            break
        history.append(Exchange(command=command, output=shell.run(command)))
        chat.answer(history[-1].output)
    return chat


def make_batch(chats: list[Conversation], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [rows, length], padded on the right, and loss weights [rows, length - 1]."""
    width = max(len(chat.ids) for chat in chats)
    ids, weights = [], []
    for chat in chats:
        num_padding = width - len(chat.ids)
        ids.append(chat.ids + [pad_id] * num_padding)
        row = [1.0 if sampled else CONTEXT_WEIGHT for sampled in chat.sampled_mask()]
        weights.append(row[1:] + [0.0] * num_padding)
    return torch.tensor(ids), torch.tensor(weights)


def rate_at(step: int, num_steps: int) -> float:
    """The share of the learning rate: linear warm-up, flat, linear decay."""
    left = (num_steps - step) / (DECAY_SHARE * num_steps)
    return min(1.0, (step + 1) / WARM_UP_STEPS, left)


def make_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else rest).append(parameter)
    muon = torch.optim.Muon(
        matrices,
        lr=LEARNING_RATE,
        momentum=0.95,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def train_step(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    batch: tuple[torch.Tensor, torch.Tensor],
    rate: float,
) -> float:
    ids, weights = batch
    logits = model(input_ids=ids[:, :-1]).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(model: Qwen3ForCausalLM, tokenizer: RendererTokenizer, num_steps: int, seed: int) -> None:
    rng = random.Random(seed)
    optimizers = make_optimizers(model)
    pad_id = model.config.pad_token_id
    for step in range(num_steps):
        mistakes = CLEAN if step < CLEAN_SHARE * num_steps else NOISY
        dice = Dice(rng=rng, mistakes=mistakes)
        task_seed = FIRST_TASK_SEED + (seed - 1) * TASK_SEEDS_PER_SEED + step
        tasks = draw_tasks(task_seed, TASKS_PER_STEP)
        chats = [demonstrate(tokenizer, task, dice) for task in tasks]
        loss = train_step(model, optimizers, make_batch(chats, pad_id), rate_at(step, num_steps))
        if step % 20 == 19:
            sys.stderr.write(f"step {step + 1}/{num_steps} loss {loss:.4f}\n")


def measure(model: Qwen3ForCausalLM, tokenizer: RendererTokenizer) -> dict[str, float]:
    """Figures on held-out tasks at temperature 1."""
    model.eval()
    played: list[Played] = []
    for part in range(4):
        tasks = draw_tasks(HELD_OUT_SEED + part, 32)
        played += play_all(model, tokenizer, tasks, seed=part)
    turns = sorted(play.num_turns for play in played)
    return {
        "num_plays": len(played),
        "mean_reward": round(mean_reward(played), 3),
        "mean_reward_trail": round(mean_reward(played, "trail"), 3),
        "mean_reward_jobs": round(mean_reward(played, "jobs"), 3),
        "mean_turns": round(fmean(turns), 2),
        "max_turns": turns[-1],
        "mean_tokens": round(fmean(play.num_tokens for play in played), 1),
        "max_tokens": max(play.num_tokens for play in played),
    }


def write_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write config and weights; the output head is the embedding and is not written twice."""
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(out)
    settings = {
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.pad_token_id,
    }
    (out / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def write_tokenizer(tokenizer_json: str, out: Path) -> None:
    (out / "tokenizer.json").write_text(tokenizer_json + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the quickstart's model folder.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=460)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started_s = time.process_time()
    raw_tokenizer = make_tokenizer(options.seed)
    tokenizer = RendererTokenizer(raw_tokenizer, name="quickstart")
    model = make_model(tokenizer, raw_tokenizer.get_vocab_size(), options.seed)
    train(model, tokenizer, options.num_steps, options.seed)
    train_cpu_s = time.process_time() - started_s
    measured = measure(model, tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    write_model(model, options.out)
    write_tokenizer(raw_tokenizer.to_str(pretty=True), options.out)
    (options.out / "measured.json").write_text(json.dumps(measured, indent=2) + "\n")
    sys.stdout.write(f"{json.dumps(measured)} after {train_cpu_s:.0f} CPU s of training\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
