"""The sizes of a model, read from its folder: nothing is loaded.

Must not know torch, roles. Invariant: weights are counted as a module holds them, a tied one once.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from opengyre.seams.errors import ConfigError
from opengyre.trainer.layers import layers_of_stage

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A dense decoder. `num_stage_weights` and `num_stage_layers` are what each pipeline stage
    trains; `num_tied` weights, of a tied embedding, are on the first and on the last one."""

    num_weights: int
    num_stage_weights: tuple[int, ...]
    num_stage_layers: tuple[int, ...]
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    num_tied: int = 0
    has_head_norms: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.num_stage_weights)

    @property
    def num_layers(self) -> int:
        return sum(self.num_stage_layers)


def read_sizes(folder: Path, *, num_stages: int = 1) -> ModelSizes:
    """Raises ConfigError for a folder that does not say them, or cannot be cut so."""
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        numbers = dict(_numbers_by_name(folder))
        return _sizes(told, numbers, num_stages)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"model {folder} does not say its sizes: {error!r}") from error


def _sizes(told: Mapping[str, Any], numbers: dict[str, int], num_stages: int) -> ModelSizes:
    is_tied = _HEAD not in numbers or bool(told.get("tie_word_embeddings"))
    if is_tied:
        numbers.pop(_HEAD, None)
    num_layers, num_heads = int(told["num_hidden_layers"]), int(told["num_attention_heads"])
    stages = [
        layers_of_stage(num_layers, stage=stage, num_stages=num_stages)
        for stage in range(num_stages)
    ]
    own = [_in_layers(numbers, layers) for layers in stages]
    own[0] += numbers[_EMBEDDING]
    own[-1] += sum(numbers.values()) - numbers[_EMBEDDING] - _in_layers(numbers, range(num_layers))
    num_tied = numbers[_EMBEDDING] if is_tied and num_stages > 1 else 0
    own[-1] += num_tied
    return ModelSizes(
        num_weights=sum(numbers.values()),
        num_stage_weights=tuple(own),
        num_stage_layers=tuple(len(layers) for layers in stages),
        hidden=int(told["hidden_size"]),
        intermediate=int(told["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(told.get("num_key_value_heads") or num_heads),
        head_dim=int(told.get("head_dim") or told["hidden_size"] // num_heads),
        vocabulary=int(told["vocab_size"]),
        num_tied=num_tied,
        has_head_norms=any(name.endswith(".q_norm.weight") for name in numbers),
    )


def _in_layers(numbers: Mapping[str, int], layers: range) -> int:
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    return sum(number for name, number in numbers.items() if name.startswith(prefixes))


def _numbers_by_name(folder: Path) -> Iterator[tuple[str, int]]:
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield name, prod(tensors.get_slice(name).get_shape())
