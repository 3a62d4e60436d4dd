"""Which engine of a fleet serves a session: where its prefixes lie, else the one with least to do.

Owns: routes of sessions, what each engine has to do. Must not know: HTTP, how an engine is asked.
Invariants: a session stays where it is while its engine is connected, so that every branch of it
finds its prefix; a new or orphaned one goes to the engine with the fewest requests, those counted
that wait there or are about to come, then the fewest sessions, then the first.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

COMING_S = 1.0
"""A session that was routed a moment ago has a request under way that its engine has not heard of;
for so long it is counted."""


@dataclass(slots=True, kw_only=True)
class Place:
    """One engine. `num_asked` tells the requests that it was asked and has not ended, running or
    waiting there; `coming` when each one was routed here that may not have arrived."""

    engine_id: str
    num_asked: Callable[[], int]
    is_connected: bool = False
    num_sessions: int = 0
    coming: deque[float] = field(default_factory=deque)

    def load(self, now_s: float) -> tuple[int, int]:
        while self.coming and self.coming[0] <= now_s - COMING_S:
            self.coming.popleft()
        return self.num_asked() + len(self.coming), self.num_sessions


class FleetRoutes:
    """`places` in the order in which ties are broken."""

    def __init__(self, places: Iterable[Place], *, now_s: Callable[[], float]) -> None:
        self._places = list(places)
        self._now_s = now_s
        self._routes: dict[str, Place] = {}

    def route(self, session: str) -> str:
        """The engine of a session that is about to make a call."""
        known = self._routes.get(session)
        if known is not None and known.is_connected:
            return known.engine_id
        return self._move(session, num_coming=1)

    def move_orphans(self, num_running: Callable[[str], int]) -> list[tuple[str, str]]:
        """New routes of the sessions whose engines are gone; none while all engines are.
        `num_running(session)`: its requests under way, which follow it; those that have most
        choose first."""
        if not any(place.is_connected for place in self._places):
            return []
        orphans = [
            (num_running(session), session)
            for session, place in self._routes.items()
            if not place.is_connected
        ]
        orphans.sort(key=lambda one: -one[0])
        return [(session, self._move(session, num_coming=num)) for num, session in orphans]

    def _move(self, session: str, *, num_coming: int) -> str:
        now_s = self._now_s()
        connected = [place for place in self._places if place.is_connected]
        best = min(connected or self._places, key=lambda place: place.load(now_s))
        before = self._routes.get(session)
        if before is not None:
            before.num_sessions -= 1
        best.num_sessions += 1
        best.coming.extend([now_s] * num_coming)
        self._routes[session] = best
        return best.engine_id
