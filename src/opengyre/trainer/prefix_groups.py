"""Groups of the cells of a prefix, and the reduction of their sums to the core.

Owns: gloo groups without a world, the store they meet in, copies of what is reduced. Must not know
cells, steps or why a group is made. Invariants: a group is made once for a rendezvous name and
stage; one that failed is never used again, and with it its connections go, so every member fails
soon after the first; the tensor that is reduced is a copy.
"""

import socket
import time
from collections import OrderedDict
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from opengyre.seams.cells import Rendezvous
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.group_limits import CHUNK_BYTES, DEFAULT, NUM_KEPT, GroupLimits

LOOPBACK = "127.0.0.1"
CONNECT_TRIES = 5
Group = Any
"""A ProcessGroupGloo, of which torch's stubs know the name only."""
_gloo: Any = ProcessGroupGloo


class GroupStore:
    """The store that a core hosts: a port of the system's choice on `host`, from the start to
    `close`. Torch names no owner of a key, so whoever reaches the port may write."""

    def __init__(self, host: str = LOOPBACK) -> None:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store: TCPStore | None = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=DEFAULT.construct_s),
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        self._store = None


class PrefixGroups:
    """One in each stage process. Sums on another device are reduced as copies in host memory."""

    def __init__(self, host: str = LOOPBACK, *, limits: GroupLimits = DEFAULT) -> None:
        self._limits = limits
        self._device = _gloo.create_device(hostname=host)
        self._store: tuple[str, TCPStore] | None = None
        self._made: OrderedDict[tuple[str, int], Group] = OrderedDict()

    @property
    def num_made(self) -> int:
        return len(self._made)

    def reduce_copy(self, flat: Tensor, *, rendezvous: Rendezvous, stage: int) -> Tensor:
        """All members' `flat` (1-dimensional, of one shape and type) added up: at rank 0, on its
        device; what other ranks get has no meaning.

        Raises BoundaryError (retryable) if a member is gone or does not come in time.
        """
        if rendezvous.size == 1:
            return flat.detach().clone()
        reduced = self._reduce(flat, rendezvous, stage)
        if isinstance(reduced, str):
            self._made.pop((rendezvous.name, stage), None)
            what = f"group {rendezvous.name}, stage {stage}: {reduced}"
            raise BoundaryError("reduce", what, retryable=True)
        return reduced.to(flat.device)

    def close(self) -> None:
        self._made.clear()
        self._store = None

    def _reduce(self, flat: Tensor, rendezvous: Rendezvous, stage: int) -> Tensor | str:
        """The reduced copy, or what failed: the error itself would keep the group, and its
        connections, alive."""
        try:
            group = self._group(rendezvous, stage)
            copy = flat.detach().to("cpu", copy=True)
            _reduce_in_place(copy, group, self._limits)
        except RuntimeError as error:  # torch has no narrower one for all that gloo meets
            return str(error).partition("This is typically")[0].strip() or "gloo failed"
        return copy

    def _group(self, rendezvous: Rendezvous, stage: int) -> Group:
        key = (rendezvous.name, stage)
        if key not in self._made:
            self._made[key] = self._make(rendezvous, stage)
        self._made.move_to_end(key)
        while len(self._made) > NUM_KEPT:
            self._made.popitem(last=False)
        return self._made[key]

    def _make(self, rendezvous: Rendezvous, stage: int) -> Group:
        """All meet first: to connect to one who is gone took gloo five times its time."""
        options = _gloo._Options()
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timedelta(seconds=self._limits.connect_s / CONNECT_TRIES)
        store = PrefixStore(f"{rendezvous.name}/{stage}", self._store_at(rendezvous.store))
        store.set(f"here/{rendezvous.rank}", "")
        here = [f"here/{rank}" for rank in range(rendezvous.size)]
        store.wait(here, timedelta(seconds=self._limits.meet_s))
        return _gloo(store, rendezvous.rank, rendezvous.size, options)

    def _store_at(self, address: str) -> TCPStore:
        """One connection; another address is another core, whose groups are all new."""
        if self._store is None or self._store[0] != address:
            self.close()
            host, _, port = address.rpartition(":")
            store = TCPStore(
                host,
                int(port),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._limits.construct_s),
            )
            self._store = (address, store)
        return self._store[1]


def _reduce_in_place(copy: Tensor, group: Group, limits: GroupLimits) -> None:
    """Chunk by chunk: what gloo holds beside it stays small, and a stop is seen soon."""
    deadline_s = time.monotonic() + limits.reduce_s
    num = max(1, CHUNK_BYTES // copy.element_size())
    for start in range(0, len(copy), num):
        left_s = min(limits.stall_s, deadline_s - time.monotonic())
        if left_s <= 0:
            raise RuntimeError(f"not through in {limits.reduce_s:g} s")
        group.reduce(copy[start : start + num], 0, timeout=timedelta(seconds=left_s)).wait()
