"""Bringing a version to an engine while its holder may go away and come back.

Owns: when a load is tried again. Must not know: which engine, what a load is. Invariants: only a
failed pull is tried again, as an engine that pulled nothing has changed nothing; the tries end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from opengyre.runtime.messages import Loaded
from opengyre.seams.errors import BoundaryError
from opengyre.transport.weights import is_refusal

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
RETRY_S = 0.5


async def until_loaded(
    load: Callable[[], Awaitable[Loaded]], *, is_due: Callable[[], bool]
) -> Loaded | None:
    """`load` asks with the descriptor of the moment: weights that were withdrawn meanwhile, or died
    with their holder, are found where they are now. None once it `is_due` no more."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + PATIENCE_S
    while is_due():
        try:
            return await load()
        except BoundaryError as error:
            is_away = error.retryable and is_refusal(error)
            if not is_away or loop.time() > deadline_s:
                raise
            log.warning("the weights are away: %s", error)
        await asyncio.sleep(RETRY_S)
    return None
