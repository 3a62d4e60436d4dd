"""Runs one execution from launch to verdict: workspace, session, harness, outcome, grade.

Owns: the order of these and their clean-up. Must not know: slots, roles, steps. Invariants: one
ExecutionClosed and one VerdictGiven per launched execution, whatever happens; no verdict is not
zero; nothing of an execution is left on disk when it is graded.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opengyre.control.facts import ExecutionClosed, Outcome
from opengyre.control.ids import ExecutionId
from opengyre.runtime import messages as m
from opengyre.runtime.book import Book, Execution
from opengyre.runtime.gateways import Gateways
from opengyre.runtime.grading import EndingRules
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.results import Results
from opengyre.runtime.rewards import Rewards
from opengyre.seams.errors import BoundaryError
from opengyre.seams.harness import Ending, Harness, HarnessJob, LaunchResult, Limits, Sandbox
from opengyre.seams.tasks import Grader, Task, Verdict
from opengyre.tasks.workspaces import lay_out_workspace, remove_tree

log = logging.getLogger(__name__)

MAX_GRADERS = 4
OVERDUE_AT_START = "its time in all (harness.overall_timeout_s) was over before it could start"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionParts:
    """What executions are made of."""

    sandbox: Sandbox
    harness: Harness
    grader: Grader
    rewards: Rewards
    limits: Limits
    model: str
    folder: Path
    max_launches: int
    rules: EndingRules = field(default_factory=EndingRules)


class Stop:
    """Set when an execution has to end before its harness does."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.is_overdue = False

    def expire(self) -> None:
        """Its overall time is over; whoever cancelled it before stays the cause."""
        if not self.event.is_set():
            self.is_overdue = True
            self.event.set()


class Executions:
    """`launch` starts one; its facts come through the inbox. `cancel` ends one early."""

    def __init__(
        self,
        parts: ExecutionParts,
        *,
        book: Book,
        gateways: Gateways,
        inbox: Inbox,
        results: Results,
    ) -> None:
        self._parts = parts
        self._book = book
        self._gateways = gateways
        self._inbox = inbox
        self._results = results
        self._stops: dict[str, Stop] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._graders = asyncio.Semaphore(MAX_GRADERS)
        self.engine_by_execution: dict[str, str] = {}

    def launch(self, execution: str, engine: str, tasks: asyncio.TaskGroup) -> None:
        self.engine_by_execution[execution] = engine
        self._stops[execution] = Stop()
        task = tasks.create_task(self._play(self._book.executions[execution]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reroute(self, moves: Sequence[tuple[str, str]]) -> None:
        """Where each execution's session is opened from now on; closed ones are left out."""
        for execution, engine in moves:
            if execution in self._stops:
                self.engine_by_execution[execution] = engine

    async def end(self, grace_s: float) -> None:
        """What still runs or is graded has `grace_s` to finish; then it is ended."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=grace_s)

    def cancel(self, execution: str, *, was_queued: bool) -> None:
        """Ends the harness; the execution closes as cancelled. Too late is fine."""
        if was_queued:
            self._results.tell_verdict(self._book.cancel_queued(execution))
        if (stop := self._stops.get(execution)) is not None:
            stop.event.set()

    @property
    def num_running(self) -> int:
        return len(self._stops)

    async def _play(self, one: Execution) -> None:
        folder = self._parts.folder / one.execution
        with self._overall_deadline(one.execution) as stop:
            result = await self._launches(one, folder)
        is_overdue = stop.is_overdue and result.ending is Ending.CANCELLED
        if is_overdue:
            result = self._parts.rules.overdue(result)
        outcome = outcome_of(result)
        del self._stops[one.execution], self.engine_by_execution[one.execution]
        self._inbox.tell(ExecutionClosed(execution=ExecutionId(one.execution), outcome=outcome))
        self._results.tell_end(one, result)
        verdict = self._parts.rules.ungraded(result, is_overdue=is_overdue)
        if verdict is None:
            verdict = await self._grade(one, folder)
        if result.is_timed_out and verdict.reward is not None:
            verdict = replace(verdict, reason=f"{verdict.reason}; {result.reason}")
        fact = self._parts.rewards.settle(one, outcome, verdict)
        self._results.tell_verdict(one)
        self._inbox.tell(fact)
        await self._remove(folder)

    @contextlib.contextmanager
    def _overall_deadline(self, execution: str) -> Iterator[Stop]:
        """The execution's stop; it expires if this lasts too long, held or not."""
        stop, overall_s = self._stops[execution], self._parts.rules.overall_s
        if overall_s is None:
            yield stop
            return
        timer = asyncio.get_running_loop().call_later(overall_s, stop.expire)
        try:
            yield stop
        finally:
            timer.cancel()

    async def _launches(self, one: Execution, folder: Path) -> LaunchResult:
        """Launch, and again after our own fault (DESIGN 2.4.9), at most `max_launches` times."""
        while True:
            self._book.begin_launch(one)
            self._results.tell_launch(one)
            result = await self._launch_once(one, folder)
            await self._end_session(one)
            result = _without_our_fault(one, result)
            is_over = self._stops[one.execution].event.is_set()
            if not result.is_our_fault or is_over or one.num_launches >= self._parts.max_launches:
                return result
            log.warning("%s is launched again: %s", one.execution, result.reason)

    async def _launch_once(self, one: Execution, folder: Path) -> LaunchResult:
        key = secrets.token_urlsafe(24)
        try:
            await asyncio.to_thread(make_folders, folder, one.task)
            gateway_url = await self._gateways.open_session(lambda: self._session(one, key))
            job = self._job(one, folder, key=key, gateway_url=gateway_url)
            spec = self._parts.harness.prepare(job)
            stop, before_s = self._stops[one.execution], _held_s(one)
            if stop.is_overdue:
                raise BoundaryError("launch", OVERDUE_AT_START, retryable=False)
            return await self._parts.sandbox.run(
                spec, held_s=lambda: _held_s(one) - before_s, stop=stop.event
            )
        except (BoundaryError, OSError) as error:
            return LaunchResult(
                ending=Ending.NOT_STARTED,
                exit_code=None,
                signal=None,
                output_tail="",
                num_output_bytes=0,
                wall_s=0.0,
                reason=str(error),
            )

    def _session(self, one: Execution, key: str) -> m.OpenSession:
        """Made right before it is sent: the route may have changed while folders were made."""
        engine = self.engine_by_execution[one.execution]
        return m.OpenSession(
            execution=one.execution,
            key=key,
            engine=engine,
            seed=one.seed,
            first_turn=one.first_turn,
        )

    def _job(self, one: Execution, folder: Path, *, key: str, gateway_url: str) -> HarnessJob:
        limits = self._parts.limits
        if one.task.agent_wall_s is not None:
            limits = replace(limits, wall_s=min(limits.wall_s, one.task.agent_wall_s))
        return HarnessJob(
            execution=one.execution,
            instruction=one.task.instruction,
            workspace=folder / "workspace",
            private_tmp=folder / "tmp",
            base_url=f"{gateway_url}/{one.execution}/v1",
            api_key=key,
            model=self._parts.model,
            limits=limits,
        )

    async def _end_session(self, one: Execution) -> None:
        try:
            await self._gateways.close_session(one.execution)
        except BoundaryError as error:
            log.warning("%s: its session did not close: %s", one.execution, error)

    async def _grade(self, one: Execution, folder: Path) -> Verdict:
        scratch = folder / "grade"
        try:
            async with self._graders:
                await asyncio.to_thread(scratch.mkdir)
                return await self._parts.grader.grade(
                    one.task, workspace=folder / "workspace", scratch=scratch
                )
        except (BoundaryError, OSError) as error:
            return Verdict(reward=None, reason=f"grading was not possible: {error}")

    async def _remove(self, folder: Path) -> None:
        try:
            await asyncio.to_thread(remove_tree, folder)
        except OSError as error:
            log.warning("%s stays behind: %s", folder, error)


def _held_s(one: Execution) -> float:
    return one.held.total_s(asyncio.get_running_loop().time())


def _without_our_fault(one: Execution, result: LaunchResult) -> LaunchResult:
    """A program that failed and never called again after its gateway died was lost through us."""
    has_failed = result.ending is Ending.SIGNALLED or result.exit_code not in (None, 0)
    if not (one.is_cut and has_failed):
        return result
    reason = f"its gateway died, then it: {result.reason}"
    return replace(result, ending=Ending.LOST, exit_code=None, signal=None, reason=reason)


def outcome_of(result: LaunchResult) -> Outcome:
    if result.is_our_fault:
        return Outcome.LOST
    if result.is_timed_out:
        return Outcome.TIMED_OUT
    if result.ending is Ending.CANCELLED:
        return Outcome.CANCELLED
    has_completed = result.ending is Ending.EXITED and result.exit_code == 0
    return Outcome.COMPLETED if has_completed else Outcome.FAILED


def make_folders(folder: Path, task: Task) -> None:
    """A fresh workspace from the task's files, and an empty private temporary folder."""
    remove_tree(folder)
    (folder / "tmp").mkdir(parents=True)
    lay_out_workspace(task, folder / "workspace")
