"""The process groups of one cell's stages.

Owns: opening them, without a world (no init_process_group). Must not know: messages, who hosts the
store where the stages meet. Invariants: gloo is bound to one host address, loopback unless told
otherwise; each name is used once on a store; forming has a deadline, what follows waits as long as
it takes. NCCL, for activations and gradients on cuda devices, one device for each stage, is written
and was never run on a GPU.
"""

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
    _meet(down, source=stage - 1, target=stage + 1, device=device)
    _meet(up, source=stage + 1, target=stage - 1, device=device)
    return Groups(headers=headers, down=down, up=up)


def _meet(group: Any, *, source: int, target: int, device: torch.device) -> None:
    """The first message of a pair makes its communicator and blocks both until it is made: here, in
    an order that cannot deadlock, and not where a stage posts a gradient ahead."""
    one = torch.zeros(1, device=device)
    if source in range(group.size()):
        group.recv([one], source, 0).wait()
    if target in range(group.size()):
        group.send([one], target, 0).wait()
    torch.cuda.synchronize(device)
