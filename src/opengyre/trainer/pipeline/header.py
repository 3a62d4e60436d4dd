"""What travels ahead of everything between two stages: int64[8].

Owns: the commands and the layout of a header. Must not know: how it is carried.
Invariants: each message between stages is announced by a header, so shapes and numbers of
micro-steps are free; a header that makes no sense is refused.
"""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from opengyre.seams.errors import BoundaryError

NUM_FIELDS = 8
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Command(enum.IntEnum):
    """RUN: forward what follows. BACK: run backwards until `count` micro-steps are finished.
    PAUSE: finish all and come to rest. DRAIN: the same, and leave. AT_REST: the answer to both,
    upstream."""

    RUN = 1
    BACK = 2
    PAUSE = 3
    DRAIN = 4
    AT_REST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`count`: micro-steps since the executor's start, this one included (RUN), to be finished
    (BACK), or in all. `finished`: how many of them the sender has finished. The rest describes the
    payload of a RUN: its aux bytes and its activations [n, T, hidden]."""

    command: Command
    count: int
    finished: int
    num_aux_bytes: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)
    dtype: torch.dtype = torch.float32


def encode(header: Header) -> Tensor:
    return torch.tensor(
        [
            header.command,
            header.count,
            header.finished,
            header.num_aux_bytes,
            *header.shape,
            _DTYPES.index(header.dtype),
        ],
        dtype=torch.int64,
    )


def decode(fields: Tensor) -> Header:
    command, count, finished, num_aux_bytes, n, num_tokens, hidden, dtype = fields.tolist()
    if command not in iter(Command) or dtype not in range(len(_DTYPES)):
        raise BoundaryError("pipeline", f"header {fields.tolist()} is none", retryable=False)
    return Header(
        command=Command(command),
        count=count,
        finished=finished,
        num_aux_bytes=num_aux_bytes,
        shape=(n, num_tokens, hidden),
        dtype=_DTYPES[dtype],
    )
