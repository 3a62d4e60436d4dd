"""Loading a causal language model that the decoder can run.

Owns: which architectures work and why another one is refused. Must not know: requests, slots.
Supported are plain full-attention decoders whose rotary angles depend on the position alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from opengyre.engines.torch_engine.kv_pool import KVShape
from opengyre.seams.errors import ConfigError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def load_model(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Any:
    """The HF module of `folder` (or hub id) in eval mode; safetensors only.

    Raises ConfigError, one line, for a folder that holds no supported model.
    """
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder)
            refuse_unsupported(config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation="sdpa",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        words = str(error).strip().split("\n")[0]
        what = "expected a folder with config.json and safetensors weights"
        raise ConfigError(f"model {folder} cannot be loaded: {words}; {what}") from error
    model, info = loaded
    _refuse_incomplete(folder, info)
    return model.to(device).eval()


def refuse_unsupported(config: Any) -> None:
    """Raises ConfigError that names the model type and what is supported."""
    reason = ""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in MODEL_TYPES:
        reason = f"architecture {config.model_type!r}"
    elif kinds != {"full_attention"} or _has_window(config):
        reason = "sliding-window attention"
    elif rope not in ROPE_TYPES:
        reason = f"rotary embedding of type {rope!r}"
    if reason:
        known = ", ".join(MODEL_TYPES)
        raise ConfigError(
            f"the embedded engine cannot run {reason}; it runs full-attention decoders "
            f"({known}); choose such a model, or another engine"
        )


def kv_shape(config: Any, *, num_slots: int, context_tokens: int) -> KVShape:
    num_heads = config.num_attention_heads
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_slots=num_slots,
        context_tokens=context_tokens,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )


def _refuse_incomplete(folder: str | Path, info: dict[str, Any]) -> None:
    """transformers draws absent weights at random and goes on; we do not."""
    absent = sorted(info["missing_keys"])
    misshapen = sorted(str(one[0]) for one in info["mismatched_keys"])
    for names, what in ((absent, "absent"), (misshapen, "of another shape than config.json says")):
        if names:
            count = f"of its weights {len(names)} are {what} ({names[0]} ...)"
            raise ConfigError(f"model {folder} cannot be loaded: {count}; save the model again")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and load reports on the user's terminal; our errors say what matters."""
    untyped: Any = logging
    verbosity, has_bar = untyped.get_verbosity(), untyped.is_progress_bar_enabled()
    untyped.set_verbosity_error()
    untyped.disable_progress_bar()
    try:
        yield
    finally:
        untyped.set_verbosity(verbosity)
        if has_bar:
            untyped.enable_progress_bar()


def _has_window(config: Any) -> bool:
    if config.model_type == "mistral":
        return getattr(config, "sliding_window", None) is not None
    return bool(getattr(config, "use_sliding_window", False))
