"""Checkpoints as safetensors: one file, or one for each stage and an index that names them.

Must not know: models, optimizers, who calls. Invariant: what is read is chosen by name, so any
number of stages restores what any other number wrote. The layout is that of sharded models:
`model.safetensors`, or `model-00001-of-00002.safetensors` and `model.safetensors.index.json`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from opengyre.seams.errors import BoundaryError


def write_part(
    folder: Path, kind: str, tensors: Mapping[str, Tensor], *, stage: int, num_stages: int
) -> None:
    """Raises BoundaryError if it cannot be written."""
    try:
        save_file(dict(tensors), _file(folder, kind, stage, num_stages), metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise BoundaryError("checkpoint", str(error), retryable=False) from error


def write_index(folder: Path, kind: str, *, num_stages: int) -> None:
    """Where each tensor is, read from the parts. One part needs no index."""
    if num_stages == 1:
        return
    where: dict[str, str] = {}
    num_bytes = 0
    for stage in range(num_stages):
        path = _file(folder, kind, stage, num_stages)
        num_bytes += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            where |= dict.fromkeys(file.keys(), path.name)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": where}
    (folder / f"{kind}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def read_named(folder: Path, kind: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Raises BoundaryError for a name that is not there, or a file that cannot be read."""
    try:
        where = _where(folder, kind)
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in where:
                raise BoundaryError("checkpoint", f"{kind} has no {name}", retryable=False)
            by_file.setdefault(where[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for file_name, wanted in by_file.items():
            with safe_open(folder / file_name, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError, ValueError) as error:
        raise BoundaryError("checkpoint", str(error), retryable=False) from error
    return tensors


def names_in(folder: Path, kind: str) -> list[str]:
    try:
        return list(_where(folder, kind))
    except (OSError, SafetensorError, ValueError) as error:
        raise BoundaryError("checkpoint", str(error), retryable=False) from error


def _where(folder: Path, kind: str) -> dict[str, str]:
    """File name by tensor name."""
    index = folder / f"{kind}.safetensors.index.json"
    if index.exists():
        where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return where
    path = folder / f"{kind}.safetensors"
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path.name)


def _file(folder: Path, kind: str, stage: int, num_stages: int) -> Path:
    if num_stages == 1:
        return folder / f"{kind}.safetensors"
    return folder / f"{kind}-{stage + 1:05}-of-{num_stages:05}.safetensors"
