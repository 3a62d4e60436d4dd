"""What a caller of an engine and the engine's process say to each other over a link.

Must not know: who asks, how a message is served. Pausing, updates and memory go over the
controller's connection, never here.
"""

import msgspec

from opengyre.seams.engine import Chunk, EngineCaps, GenerateRequest
from opengyre.seams.kv import KVRef, KVRelease, KVTaken
from opengyre.transport.framed import Wire

DOOR_IS_CLOSED = "door is closed"
CALL_DEADLINE_S = 150.0


class LinkMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the link's messages; the tag is the class name."""


class Submit(LinkMessage, frozen=True, kw_only=True):
    request: GenerateRequest


class Freeze(LinkMessage, frozen=True, kw_only=True):
    """Answered once the terminal chunk was sent. No id: everything of the engine."""

    request_id: str | None = None
    keeps_kv: bool = False


class Cancel(LinkMessage, frozen=True, kw_only=True):
    request_id: str


class Abandon(LinkMessage, frozen=True, kw_only=True):
    """A notification: the caller stopped reading; what still comes is dropped there."""

    request_id: str


class AskCaps(LinkMessage, frozen=True, kw_only=True):
    pass


class CapsTold(LinkMessage, frozen=True, kw_only=True):
    caps: EngineCaps


class ChunksTold(LinkMessage, frozen=True, kw_only=True):
    """Chunks of several requests, in order for each: one frame for each step of the engine."""

    chunks: list[tuple[str, Chunk]]


class ImportKV(LinkMessage, frozen=True, kw_only=True):
    ref: KVRef


class TakenTold(LinkMessage, frozen=True, kw_only=True):
    taken: KVTaken


class ReleaseKV(LinkMessage, frozen=True, kw_only=True):
    """Answered at once, the door shut or not."""

    ref: str


class ReleaseTold(LinkMessage, frozen=True, kw_only=True):
    release: KVRelease


class PrefixesOffered(LinkMessage, frozen=True, kw_only=True):
    """The engine asks: whose are these idle prefixes?"""

    refs: list[KVRef]


class PrefixesClaimed(LinkMessage, frozen=True, kw_only=True):
    """The caller will release these."""

    refs: list[str]


LINK_WIRE = Wire(*LinkMessage.__subclasses__())
