"""Applies the scheduler's commands: which calls on which processes each of them is.

Owns: the order of calls inside one command. Must not know: why a command was given. Invariants:
each command is answered exactly once; commands that name the same engine run in their order.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import assert_never

from opengyre.control import commands as c
from opengyre.control.facts import (
    CommandApplied,
    CommandFailed,
    CommandUnknown,
    EngineReady,
    Fact,
)
from opengyre.runtime import messages as m
from opengyre.runtime.book import Book
from opengyre.runtime.executions import Executions
from opengyre.runtime.gateways import Gateways
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.loading import until_loaded
from opengyre.runtime.processes import Processes
from opengyre.runtime.steps import CORE, Steps
from opengyre.seams.errors import BoundaryError
from opengyre.seams.memory import MemoryReport
from opengyre.seams.weights import Snapshot
from opengyre.store.observations import (
    AnyObservation,
    GroupTask,
    Role,
    RoleChange,
    VersionPublished,
)

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplierParts:
    """`save(step, version)` returns when the checkpoint is durable."""

    book: Book
    executions: Executions
    processes: Processes
    gateways: Gateways
    steps: Steps
    inbox: Inbox
    observe: Callable[[AnyObservation], None]
    save: Callable[[int, int], Awaitable[None]]
    now_s: Callable[[], float]


class Applier:
    """`start` runs a command in the background; its answer arrives as a fact."""

    def __init__(self, parts: ApplierParts) -> None:
        self._parts = parts
        self._locks: dict[str, asyncio.Lock] = {}
        self._left_rollout_s: dict[int, float] = {}
        self._due: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self.has_ended = asyncio.Event()
        self.is_failed = False
        self.end_reason = ""

    def learn(self, fact: Fact) -> None:
        """What the scheduler observed: its commands are for the lives it knows of."""
        if isinstance(fact, EngineReady):
            self._lives[fact.engine] = fact.incarnation

    def foresee(self, commands: Iterable[c.AnyCommand]) -> None:
        """They start once they are durable; no door opens under an older version from now on."""
        for command in commands:
            if isinstance(command, c.Publish):
                self._due[command.engine] = command.version

    def start(self, command: c.AnyCommand, tasks: asyncio.TaskGroup) -> None:
        engine = _meant_for(command)
        life = None if engine is None else (engine, self._lives.get(engine, 0))
        tasks.create_task(self._answer(command, life, tasks))

    async def _answer(
        self, command: c.AnyCommand, life: tuple[str, int] | None, tasks: asyncio.TaskGroup
    ) -> None:
        try:
            async with self._line_of(command):
                if life is not None and self._parts.processes.incarnation(life[0]) != life[1]:
                    what = "its life that was meant is over"
                    raise BoundaryError(life[0], what, retryable=False)
                await self._apply(command, tasks)
        except BoundaryError as error:
            if self.has_ended.is_set():
                return
            log.warning("%s failed: %s", type(command).__name__, error)
            kind = CommandUnknown if error.retryable else CommandFailed
            self._parts.inbox.tell(kind(command_id=command.command_id, reason=str(error)))
        else:
            self._parts.inbox.tell(CommandApplied(command_id=command.command_id))

    def _line_of(self, command: c.AnyCommand) -> contextlib.AbstractAsyncContextManager[None]:
        line = _line(command)
        if line is None:
            return contextlib.nullcontext()
        return self._locks.setdefault(line, asyncio.Lock())

    async def _apply(self, command: c.AnyCommand, tasks: asyncio.TaskGroup) -> None:
        match command:
            case c.DispatchGroups() | c.DispatchEval() | c.Launch() | c.Cancel():
                self._apply_to_executions(command, tasks)
            case c.CloseDoor() | c.Reroute() | c.Freeze() | c.OpenDoor() | c.Publish():
                await self._apply_to_engine(command)
            case c.EnterTraining() | c.LeaveTraining():
                await self._apply_to_cell(command)
            case c.Fence():
                engine = str(command.engine)
                self._parts.processes.fence(engine, self._lives.get(engine, 0))
            case c.EndRun():
                self.is_failed, self.end_reason = command.failed, command.reason
                self.has_ended.set()
            case _:
                await self._apply_to_step(command)

    def _apply_to_executions(
        self,
        command: c.DispatchGroups | c.DispatchEval | c.Launch | c.Cancel,
        tasks: asyncio.TaskGroup,
    ) -> None:
        book = self._parts.book
        match command:
            case c.DispatchGroups():
                for group, members in command.groups:
                    task = book.add_group(
                        group, members, burst=command.burst, version=command.version
                    )
                    self._parts.observe(GroupTask(group=group, task=task.name))
            case c.DispatchEval():
                book.add_eval(command.executions, burst=command.burst, version=command.version)
            case c.Launch():
                self._parts.executions.launch(command.execution, command.engine, tasks)
            case c.Cancel():
                self._parts.executions.cancel(command.execution, was_queued=command.was_queued)
            case _:
                assert_never(command)

    async def _apply_to_engine(
        self, command: c.CloseDoor | c.Reroute | c.Freeze | c.OpenDoor | c.Publish
    ) -> None:
        call, gateways = self._parts.processes.call, self._parts.gateways
        match command:
            case c.CloseDoor():
                self._note_leaving(command.engine)
                await gateways.shut_door(command.engine)
            case c.Reroute():
                self._parts.executions.reroute(command.moves)
                await gateways.set_routes(command.moves)
            case c.Freeze():
                await call(command.engine, m.FreezeAll(keeps_kv=True))
            case c.OpenDoor():
                await call(command.engine, m.AdmitRequests())
                await gateways.open_door(command.engine)
            case c.Publish():
                await self._publish(command)
            case _:
                assert_never(command)

    async def _publish(self, command: c.Publish) -> None:
        """DESIGN 2.5.2 at one engine; its requests are continued by the gateway.

        Where a newer version became due meanwhile the door stays shut for that one.
        """
        call, gateways, engine = self._parts.processes.call, self._parts.gateways, command.engine
        if self._due[engine] > command.version:
            return
        started_s = self._parts.now_s()
        await gateways.shut_door(engine)
        frozen: m.Frozen = await call(engine, m.FreezeAll())
        loaded = await self._load_published(engine, command.version)
        if loaded is None:
            return
        await call(engine, m.AdmitRequests())
        held_s = self._parts.now_s() - started_s
        if self._due[engine] == command.version:
            await gateways.open_door(engine)
        self._parts.observe(
            VersionPublished(
                engine=engine,
                version=loaded.version,
                checksum=loaded.checksum,
                held_s=held_s,
                num_continued=frozen.num_requests,
            )
        )

    async def _load_published(self, engine: str, version: int) -> m.Loaded | None:
        """None where a newer version became due."""

        async def load() -> m.Loaded:
            message = m.LoadVersion(version=version, snapshot=self._parts.steps.published(version))
            loaded: m.Loaded = await self._parts.processes.call(
                engine, message, timeout_s=LOAD_TIMEOUT_S
            )
            return loaded

        return await until_loaded(load, is_due=lambda: self._due[engine] == version)

    async def _apply_to_cell(self, command: c.EnterTraining | c.LeaveTraining) -> None:
        call, cell = self._parts.processes.call, command.cell
        started_s = self._left_rollout_s.pop(cell, self._parts.now_s())
        match command:
            case c.EnterTraining():
                taken = await call(f"c{cell}", m.BeTrainer())
                self._changed(cell, Role.TRAINING, started_s, taken.memory)
            case c.LeaveTraining():
                started_s = self._parts.now_s()
                loaded = await self._return_to_rollout(cell, command.version)
                self._changed(cell, Role.ROLLOUT, started_s, loaded.memory)
                self._parts.observe(
                    VersionPublished(
                        engine=f"c{cell}",
                        version=loaded.version,
                        checksum=loaded.checksum,
                        held_s=0.0,
                        num_continued=0,
                    )
                )
            case _:
                assert_never(command)

    async def _return_to_rollout(self, cell: int, version: int) -> m.Loaded:
        """Its role has changed once it answers, also where it could not pull."""
        steps = self._parts.steps
        kinds = chain([m.BeEngine], repeat(m.LoadVersion))

        async def load() -> m.Loaded:
            snapshot = await self._snapshot_for(cell, version)
            loaded: m.Loaded = await self._parts.processes.call(
                f"c{cell}",
                next(kinds)(version=version, snapshot=snapshot),
                timeout_s=LOAD_TIMEOUT_S,
            )
            return loaded

        def is_due() -> bool:
            return steps.last_published is None or steps.last_published[0] <= version

        loaded = await until_loaded(load, is_due=is_due)
        if loaded is None:
            what = f"version {version} is published no more"
            raise BoundaryError(f"c{cell}", what, retryable=False)
        return loaded

    async def _snapshot_for(self, cell: int, version: int) -> Snapshot:
        """A recalled core serves its own weights, which may be newer than the published ones."""
        steps = self._parts.steps
        return await steps.expose(version) if cell == 0 else steps.published(version)

    async def _apply_to_step(
        self,
        command: (
            c.OpenStep
            | c.Admit
            | c.Offer
            | c.CloseStep
            | c.DropMember
            | c.AbandonStep
            | c.Checkpoint
            | c.Expose
        ),
    ) -> None:
        steps = self._parts.steps
        match command:
            case c.OpenStep():
                await steps.open(command.step, command.version)
            case c.Admit():
                await steps.admit(command.step, command.cell)
            case c.Offer():
                steps.offer(command.step, command.groups)
            case c.CloseStep():
                await steps.close(command.step, command.num_groups)
            case c.DropMember():
                await steps.drop_member(command.step, command.cell)
            case c.AbandonStep():
                await steps.abandon(command.step)
            case c.Checkpoint():
                await self._parts.save(command.step, command.version)
            case c.Expose():
                await steps.publish(command.version)
            case _:
                assert_never(command)

    def _note_leaving(self, engine: str) -> None:
        if engine.startswith("c"):
            self._left_rollout_s[int(engine[1:])] = self._parts.now_s()

    def _changed(
        self, cell: int, role: Role, started_s: float, memory: MemoryReport | None
    ) -> None:
        self._parts.observe(
            RoleChange(
                cell=cell,
                role=role,
                started_s=started_s,
                ended_s=self._parts.now_s(),
                memory=memory,
            )
        )


def _meant_for(command: c.AnyCommand) -> str | None:
    """The engine or cell of whose present life this is; None: of none, or whichever lives."""
    match command:
        case c.OpenStep() | c.CloseStep() | c.Checkpoint() | c.Expose():
            return CORE
        case c.Admit():
            return f"c{command.cell}"
        case _:
            return _engine_of(command)


def _engine_of(command: c.AnyCommand) -> str | None:
    """The engine that this is about."""
    match command:
        case c.CloseDoor() | c.Freeze() | c.OpenDoor() | c.Publish():
            return command.engine
        case c.EnterTraining() | c.LeaveTraining():
            return f"c{command.cell}"
        case _:
            return None


def _line(command: c.AnyCommand) -> str | None:
    """Commands of one line run one after another, in the order of the plan; None: alone."""
    if isinstance(command, c.OpenStep | c.Offer):
        return "step"
    return _engine_of(command)
