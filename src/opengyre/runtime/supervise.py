"""Starts the processes of a run, tells their deaths, and starts dead engines again.

Consumes: exit notices and ready messages. Produces: EngineReady and EngineLost facts, engine
connections at the gateways. Invariants: an engine is announced only under the version engines
load now; an engine is started again at most `MAX_RESTARTS` times.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from opengyre.control.config import EngineSpec
from opengyre.control.facts import EngineLost, EngineReady
from opengyre.runtime import messages as m
from opengyre.runtime.gateways import Gateways
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.processes import Processes
from opengyre.runtime.steps import CORE, Steps
from opengyre.seams.errors import BoundaryError, ConfigError

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
HANG_CHECK_S = 1.0
ANNOUNCE_RETRY_S = 1.0
ANNOUNCE_PATIENCE_S = 60.0
CELL_MODULE = "opengyre.runtime.cell_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """The last durable checkpoint."""

    version: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where processes meet: unix sockets below `socket_dir`, shared memory below `plane_dir`."""

    config_json: str
    socket_dir: Path
    plane_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorParts:
    """`durable()` is the last durable checkpoint, None before the first."""

    processes: Processes
    gateways: Gateways
    inbox: Inbox
    steps: Steps
    durable: Callable[[], Durable | None]


class Supervisor:
    def __init__(
        self, engines: tuple[EngineSpec, ...], *, places: Places, parts: SupervisorParts
    ) -> None:
        self._engines = {str(spec.engine): spec for spec in engines}
        self._places = places
        self._processes = parts.processes
        self._gateways = parts.gateways
        self._inbox = parts.inbox
        self._steps = parts.steps
        self._durable = parts.durable
        self._tasks: asyncio.TaskGroup | None = None
        self._incarnations = dict.fromkeys(self._engines, 0)

    async def start_all(self, tasks: asyncio.TaskGroup) -> None:
        """Everything at once, since imports are what a start costs. What replaces the dead later
        runs in `tasks`."""
        self._tasks = tasks
        async with asyncio.TaskGroup() as starts:
            starts.create_task(self._gateways.lives.start())
            cells = [starts.create_task(self._start(engine)) for engine in self._engines]
        for cell in cells:
            await self._bring_in(cell.result())

    def died(self, name: str, incarnation: int, reason: str) -> None:
        """Told by Processes, once per incarnation."""
        if self._tasks is None:
            return
        if name in self._gateways.lives.members:
            return self._gateways.lives.died(name, incarnation, reason, self._tasks)
        spec = self._engines[name]
        self._inbox.tell(EngineLost(engine=spec.engine, incarnation=incarnation, reason=reason))
        self._tasks.create_task(self._replace(name))

    def crashed(self, error: BaseException) -> None:
        """A handler of ours failed: the run ends with what it raised."""
        if self._tasks is not None:
            self._tasks.create_task(_fail(error))

    async def watch_for_hangs(self) -> None:
        """Fence a cell that holds a claim beyond its lease; its exit is then told as a death."""
        while True:
            await asyncio.sleep(HANG_CHECK_S)
            for cell in self._steps.overdue():
                log.warning("cell %d holds a micro-step beyond its lease and is ended", cell)
                self._processes.kill(f"c{cell}")

    async def _replace(self, name: str) -> None:
        if self._incarnations[name] > MAX_RESTARTS or self._processes.is_ending:
            log.warning("%s is not started again", name)
            return
        try:
            await self._gateways.forget_engine(name)
            ready = await self._start(name)
        except (BoundaryError, ConfigError) as error:
            log.warning("%s could not be replaced: %s", name, error)
            self._processes.kill(name)
        else:
            await self._bring_in(ready)

    async def _bring_in(self, ready: m.CellReady) -> None:
        """Announce it, once more while the weights are away: their holder may be starting too.

        What dies before it is announced is replaced like everything that dies.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + ANNOUNCE_PATIENCE_S
        while self._is_current(ready):
            try:
                return await self._announce(ready)
            except BoundaryError as error:
                log.warning("%s could not be announced: %s", ready.engine, error)
            if loop.time() > deadline_s:
                self._processes.kill(ready.engine)
                return
            await asyncio.sleep(ANNOUNCE_RETRY_S)

    def _is_current(self, ready: m.CellReady) -> bool:
        return (
            self._processes.is_alive(ready.engine)
            and self._processes.incarnation(ready.engine) == ready.incarnation
        )

    async def _start(self, engine: str) -> m.CellReady:
        self._incarnations[engine] += 1
        incarnation = self._incarnations[engine]
        spec = self._engines[engine]
        socket = self._places.socket_dir / f"{engine}-{incarnation}.sock"
        setup = m.CellSetup(
            engine=engine,
            cell=spec.cell,
            incarnation=incarnation,
            slots=spec.slots,
            config_json=self._places.config_json,
            link_address=f"unix:{socket}",
            plane_dir=str(self._places.plane_dir),
        )
        ready: m.CellReady = await self._processes.start(
            engine, incarnation=incarnation, module=CELL_MODULE, setup=setup
        )
        return ready

    async def _announce(self, ready: m.CellReady) -> None:
        """Bring it to its version, connect it, tell the scheduler."""
        version, published = ready.version, self._steps.last_published
        if ready.engine == CORE and published is not None:
            version = await self._restore_core(ready.version)
        elif published is not None:
            version, snapshot = published
            message = m.LoadVersion(version=version, snapshot=snapshot)
            await self._processes.call(ready.engine, message)
        connect = m.ConnectEngine(
            engine=ready.engine, incarnation=ready.incarnation, link_address=ready.link_address
        )
        await self._gateways.connect_engine(connect)
        if not self._is_current(ready):
            raise BoundaryError(ready.engine, "it died meanwhile", retryable=False)
        engine = self._engines[ready.engine].engine
        self._inbox.tell(EngineReady(engine=engine, incarnation=ready.incarnation, version=version))

    async def _restore_core(self, first_version: int) -> int:
        """Weights and optimizer from disk, or those it starts with; returns their version.

        What the dead core exposed may be gone with it, and is not asked for again.
        """
        call, version = self._processes.call, first_version
        if (durable := self._durable()) is not None:
            version = durable.version
            await call(CORE, m.RestoreState(folder=str(durable.folder)))
        snapshot = await self._steps.expose_anew(version)
        await call(CORE, m.LoadVersion(version=version, snapshot=snapshot))
        return version


async def _fail(error: BaseException) -> None:
    raise error
