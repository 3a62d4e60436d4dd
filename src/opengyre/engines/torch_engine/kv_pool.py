"""The memory of keys and values: slots of positions, in pages that other processes can read.

Owns: the tensor, its layout, pins of a slot's prefix. Must not know: attention, requests, leases.
Invariants: a slot's prefix is one range of bytes for each layer and each of keys and values, in
this order; nobody outside reads it but by a pin, which ends before the slot is written again.
On a CPU the pool lies in shared memory and a reader copies from it; on a GPU a pin copies the
prefix to shared memory first (not run on GPU).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opengyre.control.errors import InvariantError
from opengyre.seams.kv import KVPlace
from opengyre.transport.kv_memory import KVMemory
from opengyre.transport.kv_tcp import KVServer


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    num_layers: int
    num_slots: int
    context_tokens: int
    num_kv_heads: int
    head_dim: int

    def as_tuple(self) -> tuple[int, ...]:
        per_slot = (self.context_tokens, self.num_kv_heads, self.head_dim)
        return (self.num_layers, 2, self.num_slots, *per_slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """`end` is called once; the bytes may be written from its return on."""

    place: KVPlace
    end: Callable[[], None]


class KVPool:
    """Keys and values [layer, 2, slot, position, kv head, dim]; no tensor while released. `plane`
    is how readers reach a pin: shm or tcp."""

    def __init__(
        self, shape: KVShape, *, dtype: torch.dtype, device: torch.device, plane: str = "shm"
    ) -> None:
        self.shape = shape
        self._dtype = dtype
        self._device = device
        self._plane = plane
        self._tensor: Tensor | None = None
        self._shared: _Shared | None = None
        self._owner: weakref.ref[Any] | None = None
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self._tensor is not None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.shape.num_layers * self._row_bytes

    @property
    def capacity_bytes(self) -> int:
        """Of all slots; 0 while released."""
        if self._tensor is None:
            return 0
        return self.shape.num_slots * self.shape.context_tokens * self.bytes_per_token

    def ranges_of(self, num_tokens: int) -> tuple[int, int]:
        """How many ranges the first `num_tokens` of a slot are, and the bytes of each."""
        return self._num_ranges, num_tokens * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.shape.num_kv_heads * self.shape.head_dim * self._dtype.itemsize

    @property
    def _num_ranges(self) -> int:
        return 2 * self.shape.num_layers

    def allocate(self) -> None:
        """Zeros; on a CPU pages are touched only as slots fill."""
        if self._tensor is not None:
            return
        shape = self.shape.as_tuple()
        if self._device.type != "cpu":
            self._tensor = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._owner = weakref.ref(self._tensor)
            return
        num_bytes = int(np.prod(shape)) * self._dtype.itemsize
        self._shared = _Shared(num_bytes, num_slots=self.shape.num_slots, plane=self._plane)
        plain = torch.from_numpy(self._shared.memory.view)
        self._tensor = plain.view(self._dtype).view(shape)

    def free(self) -> None:
        """Memory is back with the system on return; raises InvariantError if a view is left."""
        self._tensor = None
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
        if self._owner is not None and self._owner() is not None:
            raise InvariantError("KV memory is still referenced after release")
        self._owner = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def layer(self, index: int) -> Tensor:
        return self._held()[index]

    def copy_prefix(self, *, source: int, slot: int, num_tokens: int) -> None:
        tensor = self._held()
        tensor[:, :, slot, :num_tokens] = tensor[:, :, source, :num_tokens]

    def scrub(self, slot: int) -> None:
        self._held()[:, :, slot] = 0

    def pin(self, slot: int, num_tokens: int) -> Pin:
        """Readers may copy the first `num_tokens` of `slot` until the pin ends."""
        shared, num_bytes = self._shared, num_tokens * self._row_bytes
        if shared is not None:
            starts = [self._offset_bytes(number, slot) for number in range(self._num_ranges)]
            return shared.pin(slot, starts, num_bytes)
        staged = _Shared(num_bytes * self._num_ranges, num_slots=1, plane=self._plane)
        target = torch.from_numpy(staged.memory.view).view(self._dtype)
        prefix = self._held()[:, :, slot, :num_tokens].reshape(-1)
        target.copy_(prefix)
        starts = [number * num_bytes for number in range(self._num_ranges)]
        del target
        return Pin(place=staged.pin(0, starts, num_bytes).place, end=staged.close)

    def fill(self, number: int, slot: int, num_tokens: int, read: Callable[[Any], None]) -> None:
        """Range `number` of the first `num_tokens` of `slot` becomes what `read` writes into an
        array of uint8."""
        target = self._held()[number // 2, number % 2, slot, :num_tokens]
        if target.device.type == "cpu":
            read(target.reshape(-1).view(torch.uint8).numpy())
            return
        staged = torch.empty(target.shape, dtype=self._dtype)
        read(staged.view(-1).view(torch.uint8).numpy())
        target.copy_(staged)

    def _offset_bytes(self, number: int, slot: int) -> int:
        shape = self.shape
        return (number * shape.num_slots + slot) * shape.context_tokens * self._row_bytes

    def _held(self) -> Tensor:
        if self._tensor is None:
            raise InvariantError("KV used while released")
        return self._tensor


class _Shared:
    """Memory that others can read, and how they reach it."""

    def __init__(self, num_bytes: int, *, num_slots: int, plane: str) -> None:
        self.memory = KVMemory(num_bytes, num_slots=num_slots)
        self._server = KVServer(self.memory) if plane == "tcp" else None

    def pin(self, slot: int, starts: list[int], num_bytes: int) -> Pin:
        pins = self._server or self.memory
        place = pins.pin(slot, [(start, num_bytes) for start in starts])
        return Pin(place=place, end=lambda: pins.unpin(place.key))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.memory.close()
