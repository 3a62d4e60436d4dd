"""The process groups of one cell's stages, and the store where they meet.

Owns: opening them, without a world (no init_process_group). Must not know: messages.
Invariants: everything is bound to one host address, loopback unless told otherwise; each name is
used once on a store; forming has a deadline, what follows waits as long as it takes.
NCCL, for activations and gradients on cuda devices, is written and was never run on a GPU.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from opengyre.seams.errors import BoundaryError

LOOPBACK = "127.0.0.1"
FORMING = timedelta(seconds=120)
PATIENCE = timedelta(days=30)
"""How long a blocked stage waits: longer than anything else does."""


def host_store(host: str = LOOPBACK) -> tuple[TCPStore, str]:
    """A store listening on `host` alone, on a port of the system's choice, and its address."""
    listening = socket.create_server((host, 0), backlog=128)
    port = int(listening.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=FORMING,
        master_listen_fd=listening.detach(),
    )
    return store, f"{host}:{port}"


def store_at(address: str) -> TCPStore:
    """The store hosted at "host:port". Raises BoundaryError if there is none."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=FORMING)
    except RuntimeError as error:
        raise BoundaryError(
            "pipeline", f"no store at {address}: {error}", retryable=True
        ) from error


def open_gloo(store: Store, *, rank: int, size: int, host: str) -> dist.ProcessGroupGloo:
    """Blocks until all `size` are there. Raises RuntimeError when they are not in time."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = FORMING
    options._threads = 1
    group: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`headers` is gloo; `down` carries activations and `up` gradients: the same group on CPU, one
    NCCL communicator per direction on cuda, where both directions on one could block each other."""

    headers: Any
    down: Any
    up: Any

    def receive(self, work: Any) -> None:
        """Ends the receive of a payload: blocks on gloo; on NCCL the current stream waits."""
        if self.down is self.headers:
            work.wait(PATIENCE)
        else:
            work.wait()

    def close(self) -> None:
        if self.down is not self.headers:
            self.down.shutdown()
            self.up.shutdown()


def open_groups(
    store: Store, *, name: str, stage: int, num_stages: int, device: torch.device, host: str
) -> Groups:
    def under(kind: str) -> PrefixStore:
        return PrefixStore(f"{name}/{kind}", store)

    headers = open_gloo(under("headers"), rank=stage, size=num_stages, host=host)
    if device.type != "cuda":
        return Groups(headers=headers, down=headers, up=headers)
    torch.cuda.set_device(device)
    down, up = (
        dist.ProcessGroupNCCL(under(kind), stage, num_stages, dist.ProcessGroupNCCL.Options())
        for kind in ("down", "up")
    )
    return Groups(headers=headers, down=down, up=up)
