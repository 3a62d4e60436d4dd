"""One whole run in one thread and virtual time: the real shell, its processes as hosts of a loop.

Owns: what a seed means (shape, habits, delays), wiring, and the end of a run. Must not know: any
rule of scheduling. Real are controller, supervisor, launcher, framed connections, gateway with
its HTTP server, engine links, scripted engines, emulated cells, stream, planes, segments,
checkpoints, graders; ours are sockets, processes, threads, time, the agent and the database file.
"""

import asyncio
import gc
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from opengyre.config.harness_profile import load_profile
from opengyre.control.commands import Checkpoint, Freeze, OpenDoor, Plan, Publish
from opengyre.control.facts import (
    CommandApplied,
    CommandFailed,
    CommandUnknown,
    EngineLost,
    ExecutionClosed,
)
from opengyre.engines.scripted import ScriptedConfig
from opengyre.gateway.gateway import Gateway, GatewayEvents
from opengyre.harness.selftest import OpenSandbox, SandboxReport
from opengyre.runtime import cell_process, gateway_process
from opengyre.runtime import messages as m
from opengyre.runtime.child import Child
from opengyre.runtime.opening import Clock, OpenRun
from opengyre.runtime.prepare import Prepared
from opengyre.runtime.run import Run, RunEnd
from opengyre.seams.errors import BoundaryError, ConfigError, words_of
from opengyre.seams.harness import Level
from opengyre.seams.records import TokenRecord
from opengyre.seams.tasks import Task
from opengyre.store.checkpoints import Checkpoints
from opengyre.store.journal import Row
from opengyre.store.observations import StepReport, TurnRecorded
from opengyre.store.run_folder import RunFolder
from opengyre.store.segments import SegmentWriter
from tests.sim.seeded_agent import Habits
from tests.sim.seeded_cell import Lineage, WatchedCell, WatchedEngine, build_cell, update_by
from tests.sim.seeded_checks import RowChecks, check_what_is_left, launched_in, logprob_problem
from tests.sim.seeded_disk import Disk, SeededJournal, row_of
from tests.sim.seeded_faults import Fate, Harm, draw_at_handoffs, draw_faults, draw_gateway_deaths
from tests.sim.seeded_gateway import WatchedGateway, WatchedSegments
from tests.sim.seeded_hosts import WorldLoop
from tests.sim.seeded_loop import HOST, Deadlock, Host, Mode, waiting_tasks
from tests.sim.seeded_policy import renderer
from tests.sim.seeded_sandbox import SeededSandbox
from tests.sim.seeded_shape import Shape, is_branching, run_config
from tests.sim.seeded_wire import MemoryTransport

SHARED_MEMORY = Path("/dev/shm")
HORIZON_S = 4000.0
FIRST_AT_HANDOFFS = 600
FIRST_MIXED = 1000
MEAN_S = {
    "wire": 0.001,
    "exit": 0.01,
    "start": 0.3,
    "launch": 0.02,
    "commit": 0.003,
    "pull_all": 0.05,
    "run": 1.0,
    "_compute_for_step": 0.08,
    "commit_checkpoint": 0.05,
}


class Broken(Exception):
    """A promise does not hold; the text says which and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Rates of what the world does beside the plan."""

    zero_rate: float = 0.1
    deadline_rate: float = 0.15
    split_rate: float = 0.05
    tiny_queue_rate: float = 0.2
    lost_rate: float = 0.0
    grader_fail_rate: float = 0.0
    habits: Habits = field(default_factory=Habits)
    num_faults: int = 0
    has_handoff_faults: bool = False


def stormy(seed: int) -> Weather:
    """The weather of a seed in a hunt. Seeds from FIRST_AT_HANDOFFS on have faults at a handoff's
    own messages, of those from FIRST_MIXED on every fourth: what earlier seeds mean stays."""
    rng = Random(f"weather/{seed}")
    is_rough = rng.random() < 0.6
    habits = Habits(
        max_turns=rng.choice([1, 2, 3]),
        tool_s=rng.choice([0.2, 2.0]),
        leave_rate=rng.choice([0.0, 0.1, 0.3]),
        crash_rate=0.05 if is_rough else 0.0,
        hang_rate=0.02 if is_rough else 0.0,
        side_call_rate=rng.choice([0.0, 0.2]),
        renew_rate=0.5 if is_branching(seed) else 0.0,
    )
    return Weather(
        zero_rate=rng.choice([0.05, 0.2, 0.5]),
        lost_rate=0.05 if is_rough else 0.0,
        grader_fail_rate=0.1 if is_rough else 0.0,
        habits=habits,
        num_faults=3,
        has_handoff_faults=seed >= FIRST_AT_HANDOFFS and (seed < FIRST_MIXED or seed % 4 == 3),
    )


class WorldClock(Clock):
    def __init__(self, loop: WorldLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()


class OneTask:
    """Every group gets the same task (seams.tasks.TaskSource)."""

    num_tasks = 1

    def __init__(self, folder: Path) -> None:
        tests = folder / "tests"
        tests.mkdir(parents=True)
        (tests / "test.sh").write_text("")
        self.tasks = (
            Task(
                name="one",
                folder=folder,
                instruction="talk",
                workspace=None,
                tests=tests,
                content_hash="0",
            ),
        )

    def task_for_group(self, group_index: int) -> Task:
        return self.tasks[0]


class SeededWorld:
    """`run` gives the end of the run; it raises Broken, naming the promise."""

    def __init__(self, *, seed: int, mode: Mode, weather: Weather | None = None) -> None:
        self.seed, self.mode = seed, mode
        self.weather = weather or Weather()
        self.loop = WorldLoop(seed=seed, mode=mode)
        self.loop.delay_s = self._delay_s
        self.rng = self.loop.world
        self.problems: list[str] = []
        self.lineage = Lineage(self.wrong)
        self.engines: dict[str, WatchedEngine] = {}
        self.cells: dict[str, WatchedCell] = {}
        self.failed_groups: set[str] = set()
        self._opening: dict[str, int] = {}
        self._overtaken: dict[str, tuple[float, int]] = {}
        self._sent: dict[str, deque[int | None]] = {}
        self.gateways: dict[str, WatchedGateway] = {}
        self.checks = RowChecks(self.wrong)
        self.disk = Disk()
        self.mean_s = dict(MEAN_S)
        self.shape = Shape.draw(self.rng, seed)
        beside = Random(f"gateways/{seed}")
        self.num_gateways = beside.choice([1, 1, 2])
        self.config = run_config(self.shape, num_gateways=self.num_gateways)
        self.run_object: Run | None = None
        self.end: RunEnd | None = None
        self.controller: Host | None = None
        engines = tuple(str(spec.engine) for spec in self.shape.scheduler().engines)
        faults = draw_faults(self.rng, engines, num_most=self.weather.num_faults)
        if self.weather.has_handoff_faults:
            faults += draw_at_handoffs(beside, engines)
        else:
            faults += draw_gateway_deaths(beside)
        self.fate = Fate(self.loop, faults if self.weather.num_faults else (), engines)
        self.loop.on_kill = self.fate.see_kill
        self.on_row: list[Callable[[Row], None]] = []

    # ---- what is checked

    def wrong(self, words: str) -> None:
        self.problems.append(f"at {self.loop.time():.6f} s, step {self.loop.num_steps}: {words}")

    def _agent_wrong(self, words: str) -> None:
        """Nobody can answer once the controller is gone."""
        if self.fate.ending is None:
            self.wrong(f"P5: {words}")

    def _was_killed(self, place: str, since_s: float) -> bool:
        """Was the gateway at `place` killed since then?"""
        return any(where == place and at_s >= since_s for where, at_s in self.fate.deaths)

    def member_of_group(self, life: str) -> WatchedCell | None:
        """The cell of "c1#2", if this life of it runs now."""
        name, _, incarnation = life.partition("#")
        child = self.loop.children[name]
        is_running = not child.host.is_dead and not child.host.is_stopped
        return self.cells[name] if is_running and child.incarnation == int(incarnation) else None

    def see_row(self, row: Row) -> None:
        self.checks.see(row)
        match row.value:
            case TurnRecorded():
                if not self.disk.is_synced(self.folder / "run" / "tokens", row.value.turn.ref):
                    self.wrong(f"P13: {row.value.turn.turn} is told before its tokens are on disk")
            case ExecutionClosed():
                if row.value.execution in self.sandbox.running:
                    self.wrong(f"P2: {row.value.execution} is closed, and its agent still runs")
            case StepReport():
                self._see_step(row.value)
            case CommandApplied():
                self._see_applied(row.value)
            case EngineLost() | CommandFailed() | CommandUnknown() if not self.fate.done:
                self.wrong(f"P16: nothing went wrong yet, and {row.value}")
            case Plan():
                self._see_plan(row.value)
            case _:
                pass
        for hook in self.on_row:
            hook(row)

    def see_record(self, record: TokenRecord) -> None:
        assert self.run_object is not None
        one = self.run_object.book.executions[record.header.execution]
        if problem := logprob_problem(record, one.seed):
            self.wrong(problem)

    def _see_step(self, report: StepReport) -> None:
        """The update is the sum of what its groups say, whoever computed it."""
        assert self.run_object is not None
        groups = self.run_object._groups
        bundles = [one for group in report.groups for one in groups.bundles_of(group)]
        update = self.cells["c0"].last_update
        if report.is_applied and not np.array_equal(update, update_by(bundles)):
            self.wrong(f"P9: the update of step {report.step} is not that of its groups")

    def _see_plan(self, plan: Plan) -> None:
        for command in plan.commands:
            if isinstance(command, OpenDoor):
                self._opening[command.engine] = self.engines[command.engine].stats().version
            if isinstance(command, Publish):
                version = self.engines[command.engine].stats().version
                self._overtaken[command.engine] = (self.loop.time(), version)

    def _see_applied(self, fact: CommandApplied) -> None:
        command = self.checks.state.commands.get(fact.command_id)
        if isinstance(command, OpenDoor):
            self._opening.pop(command.engine, None)
        if isinstance(command, Freeze):
            stats = self.engines[command.engine].stats()
            if stats.num_running + stats.num_waiting > 0:
                self.wrong(f"P5: {command.engine} is frozen and still writes")
        if not isinstance(command, Checkpoint):
            return
        try:
            Checkpoints(self.folder / "run" / "checkpoints").check(command.step)
        except BoundaryError as error:
            self.wrong(f"P13: a checkpoint is acknowledged that is not there: {error}")

    def see_open_door(self, engine_id: str) -> None:
        """The gateway is about to give requests to this engine.

        An OpenDoor that is under way when a version becomes due comes before its Publish; each
        gateway is told of it, if there are several an instant later.
        """
        due, stats = self._due_version(engine_id), self.engines[engine_id].stats()
        allowed = [due, self._opening.get(engine_id), *self._sent.get(engine_id, ())]
        if stats.version not in allowed:
            self.wrong(f"P6: {engine_id} is opened with version {stats.version}, due is {due}")
        if self.engines[engine_id].is_loading:
            self.wrong(f"P6: {engine_id} is opened while it loads")

    def _due_version(self, engine_id: str) -> int | None:
        assert self.run_object is not None
        views = {str(one.engine): one for one in self.run_object.scheduler.snapshot().engines}
        return views[engine_id].due_version

    def _see_write(self, end: MemoryTransport, data: bytes) -> None:
        if b"OpenDoorAt" in data:
            engine_id = data.rpartition(b"engine")[2][1:].decode()
            told = self._sent.setdefault(engine_id, deque(maxlen=self.num_gateways))
            changed_s, version = self._overtaken.get(engine_id, (-1.0, 0))
            is_overtaken = self.loop.time() == changed_s
            told.append(version if is_overtaken else self._due_version(engine_id))
        self.fate.see_write(end, data)

    def see_launch(self, execution: str) -> None:
        if execution not in launched_in([row_of(one) for one in self.disk.rows]):
            self.wrong(f"P13: {execution} starts before its launch is on disk")
        if self.checks.state.executions[execution].outcome is not None:
            self.wrong(f"P2: {execution} starts, and is closed already")

    def _after_step(self) -> None:
        self.fate.see_step()
        if self.loop.errors:
            self.wrong(f"unhandled: {self.loop.errors[0]}")
        if self.problems:
            raise Broken(self.problems[0])

    # ---- delays

    def _delay_s(self, what: str) -> float:
        mean_s = self.mean_s.get(what, 0.01)
        if what == "pull_all":
            mean_s *= self.fate.load_factor
        draw = self.rng.random()
        if draw < self.weather.zero_rate:
            return 0.0
        if draw > 1 - self.weather.deadline_rate:
            left_s = self.loop.some_deadline_s(within_s=20 * mean_s)
            if left_s is not None:
                return left_s
        return self.rng.expovariate(1 / mean_s)

    # ---- one run

    def run(self) -> RunEnd | None:
        """To its end. Raises Broken, also when it never ends."""
        base = str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="gyre-seeded-", dir=base))
        handler = _Watching(self)
        for name in ("opengyre", "uvicorn.error", "asyncio"):
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).propagate = False
        asyncio.set_event_loop(self.loop)
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            self.loop.after_step = self._after_step
            self.loop.run_until_complete(self._main())
            self._finish()
        except Deadlock as error:
            raise Broken(str(error)) from error
        finally:
            self.loop.bury()
            asyncio.set_event_loop(None)
            for name in ("opengyre", "uvicorn.error", "asyncio"):
                logging.getLogger(name).removeHandler(handler)
                logging.getLogger(name).propagate = True
            shutil.rmtree(self.folder, ignore_errors=True)
            if is_collecting:
                gc.enable()
        return self.end

    async def _main(self) -> None:
        opened = self._open()
        self.controller = self.loop.start_host("controller", lambda: self._control(opened))
        try:
            async with asyncio.timeout(HORIZON_S):
                await self.loop.all_dead()
        except TimeoutError:
            self._stuck()

    def _stuck(self) -> None:
        waits = "" if self.run_object is None else self.run_object.scheduler.snapshot().waiting_for
        where = "; ".join(waiting_tasks(self.loop)[:40])
        raise Broken(f"P15: no end after {HORIZON_S} s; it waits for {waits}; tasks: {where}")

    async def _control(self, opened: OpenRun) -> None:
        self.run_object = Run(opened)
        try:
            self.end = await self.run_object.drive(_idle)
        except BaseExceptionGroup as group:
            self.wrong(f"the run crashed: {words_of(group)}")
            raise
        await opened.journal.close()

    def _finish(self) -> None:
        """After the last host is gone."""
        tokens = self.folder / "run" / "tokens"
        ending = self.fate.ending
        if ending in (Harm.CRASH, Harm.POWER_LOSS):
            check_what_is_left(self.disk.lose_power(self.rng, tokens), self.folder, self.wrong)
        elif self.end is None:
            self.wrong("the run ended without saying how")
        else:
            if self.end.exit_code != 0 and ending is None:
                self.wrong(f"the run failed: {self.end.reason}")
            self.checks.finish(tokens, is_whole=ending is None)
            for words in self._what_leaked(is_whole=ending is None):
                self.wrong(f"P16: {words}")
        if self.problems:
            raise Broken(self.problems[0])

    def _what_leaked(self, *, is_whole: bool) -> list[str]:
        """Tasks, listeners, sessions, slots, requests, workspaces and weights that are left."""
        assert self.run_object is not None
        found = [f"a task is left in {one}" for one in self.loop.left_tasks if is_whole]
        found += [f"somebody listens at {place}" for place in self.loop.net.listeners]
        found += [f"the agent of {one} runs" for one in self.sandbox.running]
        views = self.run_object.scheduler.snapshot().engines
        if not is_whole:
            return found
        found += [
            f"{one.num_used} slots of {one.engine} are taken" for one in views if one.num_used
        ]
        for name, gateway in self.gateways.items():
            found += [f"{one} is held at {name}" for one in gateway.held()]
            if gateway.num_sessions:
                found.append(f"{gateway.num_sessions} sessions are open at {name}")
        found += [f"the workspace of {one.name}" for one in (self.folder / "work").iterdir()]
        killed = {one.partition("-")[0] for one in self.loop.killed}
        for plane in (self.folder / "planes").iterdir():
            if plane.name.partition("-")[0] not in killed:
                found.append(f"weights at {plane.name}")
        return found

    def _open(self) -> OpenRun:
        folder = RunFolder(self.folder / "run")
        for path in (folder.tokens, folder.checkpoints, folder.logs):
            path.mkdir(parents=True)
        places = {name: self.folder / name for name in ("sockets", "planes", "work")}
        for path in places.values():
            path.mkdir()
        weather = self.weather
        self.loop.net.split_rate = weather.split_rate
        if self.rng.random() < weather.tiny_queue_rate:
            self.loop.net.high_water_bytes = 0
        self.loop.on_work = self.disk.note_sync
        self.loop.before_work = lambda name: self.fate.see_work(name, HOST.get())
        self.loop.net.on_write = self._see_write
        self.loop.programs = {
            "opengyre.runtime.cell_process": self._cell,
            "opengyre.runtime.gateway_process": self._gateway,
        }
        journal = SeededJournal(folder.db, self.loop, self.disk)
        journal.on_row = self.see_row
        self.sandbox = SeededSandbox(
            self.loop,
            habits=weather.habits,
            lost_rate=weather.lost_rate,
            grader_fail_rate=weather.grader_fail_rate,
            wrong=self._agent_wrong,
            was_killed=self._was_killed,
        )
        self.sandbox.on_launch = self.see_launch
        tasks: Any = OneTask(self.folder / "task")
        confined: Any = self.sandbox
        return OpenRun(
            prepared=Prepared(
                config=self.config,
                train=tasks,
                evaluation=tasks if self.shape.num_eval else None,
                scheduler=self.shape.scheduler(),
                profile=load_profile("gyre-agent"),
                program=None,
                warnings=(),
            ),
            folder=folder,
            journal=journal,
            sandbox=OpenSandbox(sandbox=confined, report=REPORT),
            program=Path("/agent"),
            clock=WorldClock(self.loop),
            **places,
        )

    # ---- programs of its processes

    async def _cell(self, address: str, name: str, incarnation: int) -> None:
        def build(setup: m.CellSetup) -> Any:
            config = ScriptedConfig(
                tokens_per_s=self.shape.tokens_per_s,
                max_running=setup.slots,
                context_tokens=self.config.sampling.context_tokens,
                name=setup.life,
                kv_handoff="on",
                kv_handoff_idle=True,
            )
            return build_cell(setup, config=config, watch=self)

        await _as_child(
            lambda address, child: cell_process.main(address, child, build=build),
            address,
            Child(name, incarnation),
        )

    async def _gateway(self, address: str, name: str, incarnation: int) -> None:
        def build(setup: m.GatewaySetup, events: GatewayEvents) -> tuple[Gateway, SegmentWriter]:
            recorder = WatchedSegments(Path(setup.tokens_dir), self)
            gateway = WatchedGateway(
                replace(
                    gateway_process.gateway_settings(self.config),
                    sock=gateway_process.listening_socket(setup),
                ),
                renderer=renderer(),
                recorder=recorder,
                events=events,
                now_s=self.loop.time,
            )
            gateway.watch = self
            self.gateways[name] = gateway
            return gateway, recorder

        await _as_child(
            lambda address, child: gateway_process.main(address, child, build=build),
            address,
            Child(name, incarnation, die=self._die),
        )

    async def _die(self) -> None:
        """A process of ours ends itself."""
        host = HOST.get()
        assert host is not None
        self.loop.kill_host(host, returncode=1)
        await asyncio.sleep(0)


REPORT = SandboxReport(
    level=Level.NONE,
    abi=0,
    identity="nobody",
    python=Path("/python"),
    python_paths=(),
    not_enforced=(),
    took_s=0.0,
)


class _Watching(logging.Handler):
    """An error that is logged and not raised is one all the same."""

    def __init__(self, world: SeededWorld) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.loop.errors.append(self.format(record))


async def _idle(run: Run) -> None:
    await asyncio.Event().wait()


async def _as_child(main: Any, address: str, child: Child) -> None:
    """As `run_child`: a ConfigError is told to the controller."""
    try:
        await main(address, child)
    except* ConfigError as group:
        await child.give_up(words_of(group))
