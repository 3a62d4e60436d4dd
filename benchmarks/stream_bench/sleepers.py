"""Cells that sleep instead of computing, and a desk that answers their claims over a socket.

Owns: times of their work. Must not know how a step is made. Invariant: what a claim costs a run is
paid here too: packing, framing, both ends of the socket, in one process.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from opengyre.runtime import messages as m
from opengyre.runtime.child import WIRE
from opengyre.seams.cells import MicroStep
from opengyre.trainer.stream import StepStream
from opengyre.transport.framed import Peer, connect, serve

TOKENS_PER_S = 81_920.0
PATIENCE_S = 30.0


@dataclass(slots=True)
class Desk:
    """Answers claims as the controller does; `spans` are the times of work that was told."""

    stream: StepStream
    num_groups: int
    started_s: float = field(default_factory=time.perf_counter)
    last_claim_s: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, message: Any) -> m.Message | None:
        if isinstance(message, m.Finished):
            self._finished(message)
            return None
        return await self._claim(message.cell)

    def _now_s(self) -> float:
        return time.perf_counter() - self.started_s

    def _finished(self, told: m.Finished) -> None:
        now_s = self._now_s()
        self.stream.done(told.cell, told.number, now_s)
        self.spans.append((now_s - told.run_s, now_s))
        self.changed.set()
        self.changed = asyncio.Event()

    async def _claim(self, cell: int) -> m.Claimed:
        """A micro-step, or the end when nobody can have another one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                made = self.stream.claim(cell, self._now_s()).micro_step
                if made is not None:
                    self.last_claim_s = self._now_s()
                    return m.Claimed(micro_step=made)
                if not self.stream.is_closed and len(self.stream.assigned) == self.num_groups:
                    self.stream.close(self.num_groups)
                if not self.stream.is_window_open:
                    return m.Claimed(is_closed=True)
                await self.changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Peer(reader, writer, wire=WIRE, handler=self.handle, name="cell").run()

    @property
    def step_s(self) -> float:
        return max(end for _, end in self.spans)

    @property
    def busy_until_dry_s(self) -> float:
        """Seconds of work of all cells before the last claim."""
        return sum(max(0.0, min(end, self.last_claim_s) - begin) for begin, end in self.spans)


async def run_sleepers(
    stream: StepStream, *, num_groups: int, num_cells: int, is_ahead: bool
) -> Desk:
    """All of the step; every cell is a connection of its own."""
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(stream, num_groups)
        server, address = await serve(f"unix:{folder}/desk.sock", desk.serve)
        async with server, asyncio.TaskGroup() as cells:
            desk.started_s = time.perf_counter()
            for cell in range(num_cells):
                cells.create_task(_sleeper(address, cell, is_ahead=is_ahead))
    return desk


async def _sleeper(address: str, cell: int, *, is_ahead: bool) -> None:
    """Claim, sleep, tell; with `is_ahead` the next claim is asked for while one runs."""
    peer = await connect(address, wire=WIRE, handler=_nobody, name=f"c{cell}")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(peer.run())
        asked = tasks.create_task(_claimed(peer, cell))
        while (made := await asked) is not None:
            if is_ahead:
                asked = tasks.create_task(_claimed(peer, cell))
            await _run(peer, cell, made)
            if not is_ahead:
                asked = tasks.create_task(_claimed(peer, cell))
        running.cancel()
    peer.close()


async def _claimed(peer: Peer, cell: int) -> MicroStep | None:
    claim = m.Claim(step=0, cell=cell, incarnation=1)
    claimed: m.Claimed = await peer.call(claim, timeout_s=PATIENCE_S)
    return claimed.micro_step


async def _run(peer: Peer, cell: int, made: MicroStep) -> None:
    started_s, num_tokens = time.perf_counter(), len(made.token_ids)
    await asyncio.sleep(num_tokens / TOKENS_PER_S)
    peer.notify(
        m.Finished(
            step=0,
            number=made.number,
            cell=cell,
            incarnation=1,
            num_tokens=num_tokens,
            run_s=time.perf_counter() - started_s,
        )
    )
    await peer.flush()


async def _nobody(message: Any) -> None:
    """A desk asks nothing."""
