"""Versioned in-place writing of a module's weights, all or nothing.

Must not know: requests, caches. Invariants: tensors are written with copy_, so views of them
(optimizer, tied weights) stay valid; two names of one tied weight must bring equal numbers; a
number that is not finite is never written; an update is complete only if each weight was pushed.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from opengyre.engines.checksum import checksum_of_array
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import combined


class WeightUpdate:
    """One update of `model` to `version`. Used in the compute thread."""

    def __init__(self, model: Any, version: int) -> None:
        self.version = version
        self._targets: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._checksums: dict[int, int] = {}
        self._order: list[int] = []

    @property
    def checksum(self) -> int:
        """Of the tensors in the order they were pushed, as Snapshot.checksum counts it."""
        return combined(self._order)

    def push(self, name: str, tensor: Any) -> None:
        """Write one weight. Raises BoundaryError for a name, shape or number that cannot be."""
        target = self._targets.get(name)
        if target is None:
            raise _refused(f"the model has no weight {name}")
        source = as_tensor(tensor)
        if source.shape != target.shape:
            shapes = f"{list(source.shape)} instead of {list(target.shape)}"
            raise _refused(f"weight {name} has shape {shapes}")
        if not bool(torch.isfinite(source).all()):
            raise _refused(f"weight {name} is not finite")
        checksum = checksum_of_array(_bits(source))
        if self._checksums.setdefault(id(target), checksum) != checksum:
            raise _refused(f"weight {name} is tied to one that was pushed with other numbers")
        with torch.no_grad():
            target.copy_(source)
        self._order.append(checksum)

    def check_complete(self) -> None:
        """Raises BoundaryError that names a missing weight."""
        missing = [name for name, one in self._targets.items() if id(one) not in self._checksums]
        if missing:
            raise _refused(f"{len(missing)} weights were not pushed, {missing[0]} for one")


def as_tensor(tensor: Any) -> Tensor:
    """A torch tensor or a numpy array, as a torch tensor; uint16 is the bits of bfloat16."""
    if isinstance(tensor, Tensor):
        return tensor.detach()
    array = np.asarray(tensor)
    if not array.flags.writeable:
        array = array.copy()
    plain = torch.from_numpy(array)
    return plain.view(torch.bfloat16) if plain.dtype == torch.uint16 else plain


def _bits(tensor: Tensor) -> np.ndarray:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.uint16)
    bits: np.ndarray = plain.numpy()
    return bits


def _refused(reason: str) -> BoundaryError:
    return BoundaryError("engine", reason, retryable=False)
