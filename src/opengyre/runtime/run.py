"""One training run: wires every part, drives it, ends it.

Owns: the order of starting and of shutting down. Must not know: scheduling rules or formats.
Invariants: nothing is written before the input was checked; whatever ends the run, every process
is told and gone, the journal is whole, and the summary says how it ended.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from opengyre.config.load import resolved_json
from opengyre.config.root import RunConfig
from opengyre.control.facts import StopRequested
from opengyre.control.ids import GroupId
from opengyre.control.scheduler import Scheduler
from opengyre.harness.profiles import Staged
from opengyre.runtime import messages as m
from opengyre.runtime.apply import Applier, ApplierParts
from opengyre.runtime.book import Book
from opengyre.runtime.controller import Controller
from opengyre.runtime.executions import ExecutionParts, Executions
from opengyre.runtime.gateway_lives import GatewayPlaces
from opengyre.runtime.gateways import Gateways
from opengyre.runtime.grading import ending_rules, grader_of
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.opening import OpenRun, open_run
from opengyre.runtime.prepare import Prepared, harness_of, limits_of
from opengyre.runtime.processes import Processes
from opengyre.runtime.results import Results, run_started
from opengyre.runtime.rewards import Rewards, excess_settings
from opengyre.runtime.step_figures import figures_of
from opengyre.runtime.steps import CORE, StepParts, Steps
from opengyre.runtime.supervise import Durable, Places, Supervisor, SupervisorParts
from opengyre.runtime.told import Told
from opengyre.runtime.trained_groups import TrainedGroups
from opengyre.seams.errors import BoundaryError, ConfigError, words_of
from opengyre.store.checkpoints import Checkpoints
from opengyre.store.codec import JournalValue
from opengyre.store.observations import AnyObservation, RunEnded, StepReport
from opengyre.store.segments import SegmentReader
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.views.notes import notes_of

CLAIM_LEASE_S = 120.0
END_GRACE_S = 5.0
MODEL_NAME = "policy"


Watch = Callable[["Run"], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended: `exit_code` as DESIGN 3.4 (0 done, 1 failed, 3 interrupted)."""

    folder: Path
    exit_code: int
    reason: str


class Run:
    """Wires the parts of an open run together and drives it to its end."""

    def __init__(self, opened: OpenRun) -> None:
        config, prepared = opened.config, opened.prepared
        self.opened = opened
        self._now_s = opened.clock.now_s
        self.inbox = Inbox()
        self.scheduler = Scheduler(prepared.scheduler)
        self.book = Book(train=prepared.train, evaluation=prepared.evaluation, seed=config.run.seed)
        self._groups = TrainedGroups(
            self.book, SegmentReader(opened.folder.tokens), config=config.training
        )
        self._durable: Durable | None = None
        self._checkpoints = Checkpoints(opened.folder.checkpoints)
        socket = opened.sockets / "controller.sock"
        self.processes = Processes(opened.folder.logs, address=f"unix:{socket}")
        self.gateways = Gateways(
            GatewayPlaces(
                config_json=resolved_json(config),
                tokens_dir=opened.folder.tokens,
                host=config.gateway.host,
                port=config.gateway.port,
                num_processes=config.gateway.num_processes,
            ),
            processes=self.processes,
            book=self.book,
            observe=self.observe,
        )
        self.steps = Steps(self._step_parts(config))
        self.told = Told(
            book=self.book,
            gateways=self.gateways,
            steps=self.steps,
            observe=self.observe,
            fence=self.processes.fence,
        )
        self.results = Results(self.book, self.observe)
        self.notes: list[tuple[float, str]] = []
        self.last_step: StepReport | None = None
        self.is_interrupted = False

    def observe(self, value: AnyObservation) -> None:
        """Into the journal; the last step and notes are kept for whoever watches."""
        if isinstance(value, StepReport):
            self.last_step = value
            self.opened.folder.append_metrics(msgspec.structs.asdict(value))
        self._append(self._now_s(), value)

    def _append(self, now_s: float, value: JournalValue) -> int:
        self.notes += [(now_s, words) for words in notes_of(value)]
        return self.opened.journal.append(now_s, value)

    def interrupt(self, reason: str) -> None:
        """A person or a signal asks for an early end."""
        self.is_interrupted = True
        self.inbox.tell(StopRequested(reason=reason))

    async def drive(self, watch: Watch) -> RunEnd:
        """Start, train, end. `watch` runs beside it and shows progress."""
        self.observe(run_started(self.opened.prepared))
        is_failed, reason = True, ""
        try:
            async with asyncio.TaskGroup() as tasks:
                applier = await self._start(tasks)
                beside = [
                    tasks.create_task(watch(self)),
                    tasks.create_task(self._supervisor.watch_for_hangs()),
                    tasks.create_task(self._groups.prepare(self.steps.wake)),
                ]
                await self._controller(applier).run(tasks)
                for task in beside:
                    task.cancel()
                await self._executions.end(END_GRACE_S)
                await self.processes.quit_all()
            is_failed, reason = applier.is_failed, applier.end_reason
        except* BoundaryError as group:
            reason = words_of(group)
        except* Exception as group:  # ours: told in the journal, then shown whole
            self._ended(is_failed=True, reason=words_of(group))
            raise
        finally:
            await self._quit()
        return self._ended(is_failed=is_failed, reason=reason)

    async def _quit(self) -> None:
        try:
            await self.processes.quit_all()
        finally:
            self.gateways.lives.close()

    def _controller(self, applier: Applier) -> Controller:
        return Controller(
            self.scheduler,
            inbox=self.inbox,
            journal=self.opened.journal,
            append=self._append,
            applier=applier,
            now_s=self._now_s,
        )

    async def _start(self, tasks: asyncio.TaskGroup) -> Applier:
        opened, config = self.opened, self.opened.config
        self._supervisor = Supervisor(
            opened.prepared.scheduler.engines,
            places=Places(
                config_json=resolved_json(config),
                socket_dir=opened.sockets,
                plane_dir=opened.planes,
            ),
            parts=SupervisorParts(
                processes=self.processes,
                gateways=self.gateways,
                inbox=self.inbox,
                steps=self.steps,
                durable=lambda: self._durable,
            ),
        )
        await self.processes.listen(
            self.told.handle, self._supervisor.died, self._supervisor.crashed
        )
        await self._supervisor.start_all(tasks)
        self._executions = Executions(
            self._execution_parts(),
            book=self.book,
            gateways=self.gateways,
            inbox=self.inbox,
            results=self.results,
        )
        return Applier(
            ApplierParts(
                book=self.book,
                executions=self._executions,
                processes=self.processes,
                gateways=self.gateways,
                steps=self.steps,
                inbox=self.inbox,
                observe=self.observe,
                save=self._save,
                now_s=self._now_s,
            )
        )

    def _step_parts(self, config: RunConfig) -> StepParts:
        settings = StreamSettings(
            budget_tokens=config.training.micro_step_tokens,
            lease_s=CLAIM_LEASE_S,
            max_groups=config.schedule.groups_per_step,
            lookahead_groups=config.training.lookahead_groups,
            parts_per_cell=config.topology.stages_per_cell + 1,
        )

        def make_stream(step: int, version: int) -> StepStream:
            return StepStream(
                step,
                version=version,
                bundles_of=self._groups.prepared,
                settings=settings,
                look_ahead=self._groups.look_ahead,
            )

        return StepParts(
            processes=self.processes,
            inbox=self.inbox,
            observe=self.observe,
            make_stream=make_stream,
            figures=partial(figures_of, self._groups),
            max_groups=config.schedule.groups_per_step,
            budget_tokens=settings.budget_tokens,
            may_group=config.training.reduce == "group",
            now_s=self._now_s,
        )

    def _execution_parts(self) -> ExecutionParts:
        config, sandbox = self.opened.config, self.opened.sandbox
        limits = limits_of(config)
        staged = Staged(
            python=sandbox.report.python,
            python_paths=sandbox.report.python_paths,
            gyre_agent=self.opened.program,
        )
        return ExecutionParts(
            sandbox=sandbox.sandbox,
            harness=harness_of(self.opened.prepared, staged),
            grader=grader_of(config.grading, sandbox, limits=limits),
            rewards=Rewards(
                self.opened.prepared.transforms,
                excess=excess_settings(config.training),
                say=lambda words: self.notes.append((self._now_s(), words)),
            ),
            limits=limits,
            model=MODEL_NAME,
            folder=self.opened.work,
            max_launches=config.schedule.max_launches,
            rules=ending_rules(config),
        )

    async def _save(self, step: int, version: int) -> None:
        """A checkpoint that survives kill -9; older ones beyond `keep_checkpoints` go."""
        incarnation = self.processes.incarnation(CORE)
        try:
            folder = self._checkpoints.begin(step)
            await self.processes.call(CORE, m.SaveState(folder=str(folder)))
            await asyncio.to_thread(self._checkpoints.commit, step, version=version)
        except OSError as error:
            raise BoundaryError("checkpoint", str(error), retryable=False) from error
        if self.processes.incarnation(CORE) != incarnation:
            raise BoundaryError("checkpoint", "the core died meanwhile", retryable=True)
        self._durable = Durable(version=version, folder=self._checkpoints.path(step))
        self._checkpoints.retain(self.opened.config.store.keep_checkpoints)
        self._forget_groups()

    def _forget_groups(self) -> None:
        """A durable step is not redone, and a void group never trained: nobody asks for their
        turns and rows again."""
        for group in self.book.kept_groups():
            if self.scheduler.is_over(GroupId(group)):
                self._groups.forget(group)
                self.book.forget_group(group)

    def _ended(self, *, is_failed: bool, reason: str) -> RunEnd:
        ended = RunEnded(
            is_failed=is_failed,
            is_interrupted=self.is_interrupted,
            reason=reason,
            wall_s=self._now_s(),
        )
        if self.opened.journal.failure is None:
            self.observe(ended)
        code = 1 if is_failed else (3 if self.is_interrupted else 0)
        return RunEnd(folder=self.opened.folder.path, exit_code=code, reason=reason)


async def train(
    prepared: Prepared,
    folder: Path,
    *,
    is_unsafe_allowed: bool,
    watch: Watch,
) -> RunEnd:
    """One run. SIGINT and SIGTERM end it in order; raises ConfigError for the user's input."""
    try:
        async with open_run(prepared, folder, is_unsafe_allowed=is_unsafe_allowed) as opened:
            run = Run(opened)
            with interrupted_by_signals(run):
                return await run.drive(watch)
    except* ConfigError as group:
        raise ConfigError(words_of(group)) from None


@contextlib.contextmanager
def interrupted_by_signals(run: Run) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, run.interrupt, signal.Signals(number).name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
