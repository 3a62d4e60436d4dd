"""Prefixes that one engine keeps and another may read, from their offer to their release.

Owns: every reference that this gateway was given, telling its stages, asking for its end, and the
handing over of idle ones. Must not know: HTTP, turns' tokens, how a prefix travels. Invariants: a
reference is let go of once, at the latest with its lease, and RELEASED is the last word of it; a
release is asked of the life that pinned; nobody who waits for tokens waits for it; nothing that is
asked outlives its deadline, and nothing outlives the gateway.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from opengyre.gateway.routing import EngineLost, Routing, Seat
from opengyre.seams.engine import ENGINE_LOST
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import HandoffStage, KVRef, KVRelease, KVTaken

MAX_KEPT = 4096
MAX_IMPORTS = 4
RELEASE_DEADLINE_S = 5.0
IMPORT_DEADLINE_S = 30.0
NO_ANSWER = "no answer"
UNUSED = "unused"
_ASK_AGAIN_S = 0.2
_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One stage of one reference, as it is told. `turn` "": an idle prefix. `num_tokens` are the
    reference's; with ACKNOWLEDGED what is cached at `to_engine`, `num_bytes` read in `read_s`."""

    ref: str
    stage: HandoffStage
    execution: str
    turn: str
    attempt: int
    from_engine: str
    to_engine: str
    version: int
    num_tokens: int
    num_bytes: int
    read_s: float
    reason: str


class Kept:
    """A pinned prefix that this gateway was told of. Nothing happens once it `is_over`."""

    def __init__(
        self, ref: KVRef, source: Seat, *, turn: str, attempt: int, owner: "Handoffs"
    ) -> None:
        self.ref = ref
        self.source = source
        self.ending: asyncio.Task[None] | None = None
        self._turn = turn
        self._attempt = attempt
        self._owner = owner
        self._to_engine = ""
        self._is_acknowledged = False
        self._has_served = False
        self._lease_end = asyncio.get_running_loop().call_later(ref.lease_s, self.let_go)

    @property
    def is_over(self) -> bool:
        return self.ending is not None

    def is_of(self, seat: Seat) -> bool:
        """It lies in the memory of this engine life."""
        here = (seat.engine_id, seat.incarnation)
        return here == (self.source.engine_id, self.source.incarnation)

    def offer(self, seat: Seat) -> KVRef | None:
        """What a request to `seat` goes with; None: it has to be computed."""
        if not self._owner.is_there(self.source):
            self.let_go()
        if self.is_over:
            return None
        self._to_engine, self._is_acknowledged = seat.engine_id, False
        self._tell(HandoffStage.OFFERED)
        return self.ref

    def acknowledge(self, taken: KVTaken) -> None:
        """`taken` by the engine to which it was offered last; nobody keeps what that computes."""
        if self.is_over or self._is_acknowledged:
            return
        self._is_acknowledged = True
        self._has_served = not self._turn and taken.num_tokens > 0
        self._tell(HandoffStage.ACKNOWLEDGED, taken=taken)
        if taken.num_tokens == 0:
            self.let_go()

    def take_over(self) -> None:
        """That engine samples: what is kept elsewhere serves nobody."""
        if self._is_acknowledged and not self.is_over:
            self._has_served = True
            self._tell(HandoffStage.TAKEN_OVER)
        self.let_go()

    def let_go(self) -> None:
        if not self.is_over:
            self._lease_end.cancel()
            self.ending = self._owner.end(self)

    def released(self, how: str) -> None:
        """`how` the pin ended, or that it was for nothing."""
        is_unused = how == KVRelease.RELEASED and not self._has_served
        self._tell(HandoffStage.RELEASED, reason=UNUSED if is_unused else how)

    def _tell(self, stage: HandoffStage, *, taken: KVTaken | None = None, reason: str = "") -> None:
        ref = self.ref
        self._owner.on_handoff(
            Handoff(
                ref=ref.ref,
                stage=stage,
                execution=ref.execution,
                turn=self._turn,
                attempt=self._attempt,
                from_engine=self.source.engine_id,
                to_engine=self._to_engine,
                version=ref.version,
                num_tokens=ref.num_tokens if taken is None else taken.num_tokens,
                num_bytes=ref.place.num_bytes if taken is None else taken.num_bytes,
                read_s=0.0 if taken is None else taken.read_s,
                reason=reason if taken is None else taken.reason[:_MAX_REASON_CHARS],
            )
        )


class Handoffs:
    """Entered beside the gateway's server; leaving waits for the releases that were asked."""

    def __init__(self, routing: Routing, *, on_handoff: Callable[[Handoff], None]) -> None:
        self.on_handoff = on_handoff
        self._routing = routing
        self._kept: dict[str, Kept] = {}
        self._imports: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_IMPORTS)
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for kept in list(self._kept.values()):
            kept.let_go()
        for one in self._imports:
            one.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def keep(self, ref: KVRef, source: Seat, *, turn: str, attempt: int) -> Kept | None:
        """None: too many are kept, or this one is already, or it has no lease that can be; then it
        ends by itself."""
        is_full = len(self._kept) >= MAX_KEPT
        if is_full or ref.ref in self._kept or not 0 < ref.lease_s < math.inf:
            return None
        kept = Kept(ref, source, turn=turn, attempt=attempt, owner=self)
        self._kept[ref.ref] = kept
        return kept

    def is_there(self, source: Seat) -> bool:
        return self._routing.seat_of(source.engine_id, source.incarnation) is not None

    def end(self, kept: Kept) -> asyncio.Task[None]:
        """Ask for the end of the pin, in the background."""
        return self._tasks.create_task(self._end(kept))

    async def settle(self, execution: str | None = None) -> None:
        """Let go of what is kept of it (None: of all); returns when RELEASED was told of each."""
        kept = [one for one in self._kept.values() if execution in (None, one.ref.execution)]
        for one in kept:
            one.let_go()
        if endings := [one.ending for one in kept if one.ending is not None]:
            await asyncio.wait(endings)

    def hand_over_idle(self, ref: KVRef, source: Seat) -> bool:
        """Have the engine that its execution is routed to now cache it, in the background. False:
        there is none, it is not kept here."""
        seat = self._routing.open_seat(ref.execution)
        if seat is None or seat.engine_id == source.engine_id:
            return False
        if (kept := self.keep(ref, source, turn="", attempt=0)) is None:
            return False
        task = self._tasks.create_task(self._import(kept, seat))
        self._imports.add(task)
        task.add_done_callback(self._imports.discard)
        return True

    async def _import(self, kept: Kept, seat: Seat) -> None:
        try:
            async with self._room, asyncio.timeout(IMPORT_DEADLINE_S):
                await self._import_at(kept, seat)
        except (EngineLost, BoundaryError, TimeoutError):
            return
        finally:
            kept.let_go()

    async def _import_at(self, kept: Kept, seat: Seat) -> None:
        if (ref := kept.offer(seat)) is None:
            return
        with self._routing.lease(seat) as lease:
            taken = await lease.wait_for(seat.engine.import_kv(ref))
        if not wrong_with(taken, ref):
            kept.acknowledge(taken)

    async def _end(self, kept: Kept) -> None:
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                how = await self._ask(kept)
        except TimeoutError:
            how = NO_ANSWER
        finally:
            self._kept.pop(kept.ref.ref, None)
        kept.released(how)

    async def _ask(self, kept: Kept) -> str:
        """How the pin ended; a connection that broke may be made again."""
        source = kept.source
        while seat := self._routing.seat_of(source.engine_id, source.incarnation):
            with contextlib.suppress(EngineLost, BoundaryError), self._routing.lease(seat) as lease:
                return str(await lease.wait_for(seat.engine.release_kv(kept.ref.ref)))
            await asyncio.sleep(_ASK_AGAIN_S)
        return ENGINE_LOST


def wrong_with(taken: KVTaken, ref: KVRef) -> str:
    """In words, why this cannot be the acknowledgement of `ref`."""
    if taken.ref != ref.ref:
        return f"acknowledges {taken.ref}, which it was not offered"
    if not 0 <= taken.num_tokens <= ref.num_tokens:
        return f"acknowledges {taken.num_tokens} tokens of {ref.num_tokens}"
    if taken.num_tokens > 0 and taken.version != ref.version:
        return f"acknowledges a prefix of version {ref.version} under version {taken.version}"
    if taken.num_bytes < 0 or not 0 <= taken.read_s < math.inf:
        return "acknowledges a number of bytes or seconds that cannot be"
    return ""
