"""A cell of the benchmark: the engine, link and training side of a cell's process, on one module.

Started by `moves.py`; does in each call what `runtime/cell_process.py` does for the controller's.
"""

import asyncio
import contextlib
import mmap
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from moves_bench import messages as m
from moves_bench.models import model_of

from opengyre.engines.compute import ComputeThread
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.runtime.planes import pull_all
from opengyre.seams.engine import GenerateRequest
from opengyre.seams.weights import Snapshot, WeightPlane
from opengyre.trainer.embedded import EmbeddedCell, whole_cell
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.stage import StageSettings
from opengyre.transport.chunk_stream import collect
from opengyre.transport.engine_server import EngineServer
from opengyre.transport.framed import connect
from opengyre.transport.weights_shm import SharedMemoryPlane

VERSION = 0
LEASE_S = 30.0
NUM_WARM = 3
WARM_TOKENS = 256
COPY_ROUNDS = 3


class CellSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`plane`: how others read its pins. `address`: where `moves.py` listens."""

    cell: int
    address: str
    model: str
    plane: str
    handoff: str
    context_tokens: int
    num_slots: int
    step_tokens: int


@dataclass(slots=True, kw_only=True)
class Cell:
    compute: ComputeThread
    engine: TorchEngine
    backend: EmbeddedCell
    weights: WeightPlane
    link: EngineServer
    quit: asyncio.Event = field(default_factory=asyncio.Event)
    published: Snapshot | None = None

    async def handle(self, message: Any) -> m.Message | None:
        match message:
            case m.CloseAndFreeze(keeps_kv=keeps_kv):
                return await self._freeze(keeps_kv=keeps_kv)
            case m.EnterTraining():
                return await self._enter()
            case m.LeaveTraining(num_used=num_used):
                left = await self._leave()
                for slot in range(num_used):
                    await self.compute.run(self.engine._pool.scrub, slot)
                self.link.open_door()
                return left
            case m.Copy(num_bytes=num_bytes):
                return await self.compute.run(_copy, num_bytes)
            case _:
                self.quit.set()
                return None

    async def prepare(self) -> None:
        """Weights are published, each role was had once, and the engine knows its speed."""
        for number in range(NUM_WARM):
            request = GenerateRequest(
                request_id=f"warm{number}",
                execution=f"warm{number}",
                prompt_ids=[number + 1] * WARM_TOKENS,
                max_new_tokens=4,
            )
            await collect(self.engine.submit(request))
        await self._enter()
        self.published = await self.compute.run(self._expose)
        await self._leave()
        self.link.open_door()

    def _expose(self) -> Snapshot:
        return self.backend.expose_weights(VERSION, pinned=[VERSION])

    async def _freeze(self, *, keeps_kv: bool) -> m.Frozen:
        began_s = time.perf_counter()
        self.link.close_door()
        await self.link.freeze_all(keeps_kv=keeps_kv)
        seconds = time.perf_counter() - began_s
        return m.Frozen(seconds=seconds, num_pinned=self.engine.stats().num_pinned)

    async def _enter(self) -> m.Entered:
        began_s = time.perf_counter()
        await self.engine.pause()
        await self.engine.release()
        released_s = time.perf_counter()
        await self.compute.run(self.backend.enter_training)
        ended_s = time.perf_counter()
        return m.Entered(release_s=released_s - began_s, enter_s=ended_s - released_s)

    async def _leave(self) -> m.Left:
        began_s = time.perf_counter()
        await self.compute.run(self.backend.leave_training)
        left_s = time.perf_counter()
        await self.engine.restore()
        restored_s = time.perf_counter()
        await self._load()
        return m.Left(
            leave_s=left_s - began_s,
            restore_s=restored_s - left_s,
            load_s=time.perf_counter() - restored_s,
        )

    async def _load(self) -> None:
        assert self.published is not None, "nothing was published"
        tensors = await asyncio.to_thread(pull_all, self.weights, self.published)
        await self.engine.pause()
        await self.engine.begin_update(VERSION)
        for name, tensor in tensors.items():
            await self.engine.push(name, tensor)
        await self.engine.commit(VERSION)
        await self.engine.resume()


@contextlib.asynccontextmanager
async def open_cell(spec: CellSpec) -> AsyncIterator[tuple[Cell, m.Ready]]:
    torch.set_num_threads(1)
    module = model_of(spec.model, positions=spec.context_tokens)
    async with contextlib.AsyncExitStack() as stack:
        compute = ComputeThread(on_start=lambda: torch.set_num_threads(1))
        stack.callback(compute.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        planes = [
            stack.enter_context(contextlib.closing(SharedMemoryPlane(folder, slot=f"{what}")))
            for what in ("weights", "gradients")
        ]
        engine = TorchEngine(
            module,
            TorchEngineConfig(
                max_running=spec.num_slots,
                num_kv_slots=spec.num_slots,
                context_tokens=spec.context_tokens,
                step_tokens=spec.step_tokens,
                version=VERSION,
                kv_handoff=spec.handoff,
                kv_handoff_idle=True,
                kv_lease_s=LEASE_S,
                kv_plane=spec.plane,
            ),
            compute,
        )
        settings = StageSettings(loss=StreamedLoss(), optimizer=AdamWSettings(learning_rate=1e-6))
        backend = whole_cell(module, weights=planes[0], gradients=planes[1], settings=settings)
        link = await stack.enter_async_context(EngineServer(engine, f"unix:{folder / 'link.sock'}"))
        cell = Cell(compute=compute, engine=engine, backend=backend, weights=planes[0], link=link)
        await cell.prepare()
        stats = engine.stats()
        ready = m.Ready(
            cell=spec.cell,
            link_address=link.address,
            bytes_per_token=stats.kv_capacity_bytes // (spec.num_slots * spec.context_tokens),
            num_parameters=sum(one.numel() for one in module.parameters()),
        )
        yield cell, ready


def _copy(num_bytes: int) -> m.Copied:
    source = np.ones(num_bytes, np.uint8)
    target = np.ones(num_bytes, np.uint8)
    warm_s, new_s = [], []
    for _ in range(COPY_ROUNDS):
        began_s = time.perf_counter()
        np.copyto(target, source)
        warm_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        fresh = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        np.copyto(fresh, source)
        new_s.append(time.perf_counter() - began_s)
        del fresh
    return m.Copied(warm_s=min(warm_s), new_s=min(new_s))


async def serve(spec: CellSpec) -> None:
    async with open_cell(spec) as (cell, ready):
        peer = await connect(spec.address, wire=m.WIRE, handler=cell.handle, name="moves")
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(peer.run())
            peer.notify(ready)
            gone = tasks.create_task(peer.closed.wait())
            quit_ = tasks.create_task(cell.quit.wait())
            await asyncio.wait([gone, quit_], return_when=asyncio.FIRST_COMPLETED)
            peer.close()
            for one in (running, gone, quit_):
                one.cancel()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=CellSpec)))
