"""What `moves.py` says to its two cells, and how long their parts of a move took."""

import msgspec

from opengyre.transport.framed import Wire


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Ready(Message, frozen=True, kw_only=True):
    """A cell is up, its door open. Told by itself."""

    cell: int
    link_address: str
    bytes_per_token: int
    num_parameters: int


class CloseAndFreeze(Message, frozen=True, kw_only=True):
    keeps_kv: bool


class Frozen(Message, frozen=True, kw_only=True):
    seconds: float
    num_pinned: int


class EnterTraining(Message, frozen=True, kw_only=True):
    pass


class Entered(Message, frozen=True, kw_only=True):
    """`release_s` waits for the last pin's end."""

    release_s: float
    enter_s: float


class LeaveTraining(Message, frozen=True, kw_only=True):
    """The memory of `num_used` slots is touched then, as that of an engine that served for long is:
    the first writing of a page takes longer than the writing."""

    num_used: int


class Left(Message, frozen=True, kw_only=True):
    """`load_s`: pull, verify and write the published weights, which every return does."""

    leave_s: float
    restore_s: float
    load_s: float


class Copy(Message, frozen=True, kw_only=True):
    num_bytes: int


class Copied(Message, frozen=True, kw_only=True):
    """By numpy, in the cell's process: into memory used before, and into new shared memory."""

    warm_s: float
    new_s: float


class Quit(Message, frozen=True, kw_only=True):
    pass


WIRE = Wire(*Message.__subclasses__())
