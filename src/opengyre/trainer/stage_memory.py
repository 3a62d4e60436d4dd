"""What tensors hold in memory, and the meter of the device that they lie on.

Must not know what tensors mean. Invariant: memory that several tensors share counts once, and that
which was given back not at all.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from opengyre.trainer.resident import Meter, ProcessMeter


def bytes_of(tensors: Iterable[Tensor]) -> int:
    there = {one.data_ptr(): one.nbytes for one in tensors if one.untyped_storage().size()}
    return sum(there.values())


class DeviceMeter:
    """What torch allocated on a CUDA device (not run on a GPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def meter_of(device: torch.device) -> Meter:
    return DeviceMeter(device) if device.type == "cuda" else ProcessMeter()
