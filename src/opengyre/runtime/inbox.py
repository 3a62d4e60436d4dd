"""The one queue of facts on their way to the scheduler.

Invariant: bounded; a fact told after the end is dropped and counted, never lost silently.
"""

import asyncio

from opengyre.control.errors import InvariantError
from opengyre.control.facts import Fact

MAX_FACTS = 100_000


class Inbox:
    """`tell` from any handler of this loop; `batch` by the controller's loop alone."""

    def __init__(self) -> None:
        self._facts: list[Fact] = []
        self._arrived = asyncio.Event()

    def tell(self, fact: Fact) -> None:
        if len(self._facts) >= MAX_FACTS:
            raise InvariantError(f"{MAX_FACTS} facts wait for the scheduler")
        self._facts.append(fact)
        self._arrived.set()

    async def batch(self, wait_s: float) -> list[Fact]:
        """All facts that are here, or after at most `wait_s` none."""
        try:
            async with asyncio.timeout(wait_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        self._arrived.clear()
        facts, self._facts = self._facts, []
        return facts
