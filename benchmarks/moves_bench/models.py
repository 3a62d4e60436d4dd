"""The model that `engines.py` and `moves.py` measure, by the word after their `--model`."""

import argparse
from pathlib import Path
from typing import Any

from smollm2 import model_folder

TINY, SMOLLM2 = "tiny", "smollm2"
HELP = "tiny (0.69 M parameters, random), smollm2 (SmolLM2-135M), or a model folder"


def chosen(word: str) -> str:
    """What `--model` says: a name, or a folder's whole path. SmolLM2's folder is made here if it is
    not there; without its extra the program ends with one line."""
    if word == SMOLLM2:
        model_folder()
    if word in (TINY, SMOLLM2):
        return word
    folder = Path(word).resolve()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{word}: expected tiny, smollm2 or a model folder")
    return str(folder)


def model_of(word: str, *, positions: int) -> Any:
    """The module in eval mode, float32, with room for `positions` positions. The tiny one is of the
    quickstart's size."""
    import torch

    from opengyre.engines.torch_engine.model import load_model

    if word == TINY:
        torch.manual_seed(0)
        return _tiny_model(positions)
    model = load_model(model_folder() if word == SMOLLM2 else Path(word))
    model.config.max_position_embeddings = max(positions, model.config.max_position_embeddings)
    return model


def _tiny_model(positions: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=769,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.eval()
