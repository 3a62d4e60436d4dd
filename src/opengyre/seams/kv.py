"""What two engines say to each other of a prefix whose keys and values one holds and one wants.

Owns: the reference, where its bytes lie, what became of it. Must not know: how bytes travel.
Invariants: a reference is of one version and one model; reading is legal while its lease lasts and
is checked after the last byte; computing the prefix anew is always legal and gives the same tokens.
"""

from enum import StrEnum

import msgspec


class KVPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes lie: `num_ranges` ranges of `range_bytes` each (layer by layer, keys before
    values, one row for each token). `kind` is shm (memory of a process of this host), tcp, or
    scripted (there are none). `address` is read by the kind's own reader; `key` is drawn at random
    for each pin, and what does not know it reads nothing."""

    kind: str
    address: str
    key: str
    num_ranges: int
    range_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_ranges * self.range_bytes


class KVRef(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned prefix of `num_tokens` tokens. `ref` is unique over all engines and lives.

    `digest` is of these tokens (`digest_of`); `model` names architecture, sizes and type of the
    cache; the lease ends `lease_s` after the pin. `ids` are the tokens themselves where nobody else
    knows them: of an idle prefix.
    """

    ref: str
    execution: str
    num_tokens: int
    digest: str
    version: int
    model: str
    lease_s: float
    place: KVPlace
    ids: list[int] = []


class KVTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The acknowledgement: nothing is read of `ref` any more. `num_tokens` of it are cached at the
    destination now, under weights of `version`: all, or none. `reason` says why nothing was read:
    it is computed, or was cached before."""

    ref: str
    num_tokens: int
    version: int = 0
    num_bytes: int = 0
    read_s: float = 0.0
    reason: str = ""


class KVRelease(StrEnum):
    """How a pin ended. UNKNOWN: that was told before, or there never was one."""

    RELEASED = "released"
    LEASE_ENDED = "lease ended"
    DROPPED = "dropped"
    UNKNOWN = "unknown"


class HandoffStage(StrEnum):
    """What became of a pinned prefix, one after the other; those in the middle may be left out."""

    OFFERED = "offered"
    ACKNOWLEDGED = "acknowledged"
    TAKEN_OVER = "taken_over"
    RELEASED = "released"
