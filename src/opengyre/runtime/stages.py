"""The processes of a cell's other pipeline stages, started by the cell's own process.

Owns: their start, their channels, their end. Must not know: what a stage does. Invariants: they die
with the process that started them; the death of one ends the cell.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from opengyre.runtime.messages import CellSetup
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.orders import ALL
from opengyre.transport.blocking import Channel

log = logging.getLogger(__name__)

MODULE = "opengyre.runtime.stage_process"
LEAVE_S = 5.0


class StageSetup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a stage: its place in `cell`, and where its neighbours meet (`store` is
    host:port)."""

    cell: CellSetup
    stage: int
    num_stages: int
    store: str


STAGE_TYPES: tuple[type[msgspec.Struct], ...] = (StageSetup, *ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProcesses:
    """The stages after the first, in order."""

    channels: list[Channel]
    processes: list[asyncio.subprocess.Process]

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self.processes]

    async def watch(self) -> None:
        """Raises BoundaryError when one of them is gone; returns when there is none."""
        if not self.processes:
            return
        waits = [asyncio.ensure_future(one.wait()) for one in self.processes]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        first = waits.index(next(iter(done)))
        one = self.processes[first]
        what = f"pipeline stage {first + 1}, pid {one.pid}, ended with code {one.returncode}"
        raise BoundaryError("cell", what, retryable=False)


@contextlib.asynccontextmanager
async def start_stages(num_others: int) -> AsyncIterator[StageProcesses]:
    """Start them all; nothing of them is left afterwards."""
    started = StageProcesses(channels=[], processes=[])
    try:
        for _ in range(num_others):
            await _start(started)
        yield started
    finally:
        for channel in started.channels:
            channel.close()
        await _end(started.processes)


async def _start(started: StageProcesses) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=dict(os.environ),
        )
    started.channels.append(Channel(ours, STAGE_TYPES))
    started.processes.append(process)


async def _end(processes: list[asyncio.subprocess.Process]) -> None:
    """They end when their channel does; those that do not are killed."""
    waits = [asyncio.ensure_future(one.wait()) for one in processes]
    if not waits:
        return
    _, late = await asyncio.wait(waits, timeout=LEAVE_S)
    for one in processes:
        if one.returncode is None:
            log.warning("pipeline stage %d did not end in time and is killed", one.pid)
            one.kill()
    if late:
        await asyncio.wait(late, timeout=LEAVE_S)
