"""Room for long bodies: how many bytes of them are read and encoded at the same time.

Must not know: HTTP. Invariants: what is held never exceeds the room; a body longer than all of it
takes all of it; those who wait are served in the order in which they came.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NoRoom(Exception):
    """It did not become free in time."""


class Room:
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_free = num_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, num_bytes: int, *, limit_s: float) -> AsyncIterator[None]:
        """Inside, `num_bytes` are taken; for none there is no wait. Raises NoRoom if they are not
        free in `limit_s`."""
        wanted = min(num_bytes, self._num_bytes)
        try:
            async with asyncio.timeout(limit_s):
                await self._take(wanted)
        except TimeoutError as error:
            raise NoRoom from error
        try:
            yield
        finally:
            self._give(wanted)

    async def _take(self, wanted: int) -> None:
        is_first = not self._waiting or not wanted
        if is_first and wanted <= self._num_free:
            self._num_free -= wanted
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            was_served = turn.done() and not turn.cancelled()
            self._give(wanted if was_served else 0)
            raise

    def _give(self, num_bytes: int) -> None:
        self._num_free += num_bytes
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done() and wanted > self._num_free:
                return
            self._waiting.popleft()
            if not turn.done():
                self._num_free -= wanted
                turn.set_result(None)
