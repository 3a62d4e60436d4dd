"""The safetensors files of a model folder, read tensor by tensor.

Owns: finding a tensor by its name in one file or in shards. Must not know models. Invariant: no
more than one tensor is in memory beside the ones that are filled.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opengyre.seams.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def fill_from(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write each of `tensors`, by its name, from the files of `folder`, cast to its dtype.

    Raises ConfigError, one line, for a tensor that is missing or of another shape.
    """
    names_by_file: dict[str, list[str]] = {}
    file_by_name = _file_by_name(folder)
    for name in tensors:
        if name not in file_by_name:
            raise _refusal(folder, f"weight {name} is in none of its files")
        names_by_file.setdefault(file_by_name[name], []).append(name)
    for file, names in names_by_file.items():
        try:
            _fill(folder / file, {name: tensors[name] for name in names})
        except (OSError, SafetensorError, ValueError) as error:
            raise _refusal(folder, f"{file}: {str(error).splitlines()[0]}") from error


def _fill(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, tensor in tensors.items():
            shape = list(file.get_slice(name).get_shape())
            if shape != list(tensor.shape):
                want = list(tensor.shape)
                raise ValueError(f"weight {name} has shape {shape}, config.json says {want}")
            tensor.copy_(file.get_tensor(name))


def _file_by_name(folder: Path) -> dict[str, str]:
    try:
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            return dict(index["weight_map"])
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        words = str(error).splitlines()[0]
        raise _refusal(folder, f"no readable {SINGLE} or {INDEX} ({words})") from error


def _refusal(folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"model {folder} cannot be loaded: {reason}; save the model again")
