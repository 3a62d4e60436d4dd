"""The one thread of a process in which forward and backward passes run.

Owned by the cell process and shared by its engine and its trainer, so that a rollout step and a
training pass never overlap: they queue. Must not know: what it runs.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class ComputeThread:
    """First come, first served. `on_start` runs once in the thread (thread counts, seeds).

    The thread starts with the first call and ends with `close`.
    """

    def __init__(self, *, on_start: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="compute", initializer=on_start
        )

    async def run(self, work: Callable[[*Args], Result], *args: *Args) -> Result:
        """Await `work(*args)`. A cancelled wait does not stop work that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        """Wait for the work in hand, refuse what is queued, end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
