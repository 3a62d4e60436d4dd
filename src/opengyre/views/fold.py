"""How each journal row changes what is known of a run.

Owns: the one reading of facts, plans and observations that report, verify, summary and the
command line share. Must not know: the scheduler's own counters. Invariant: a pure fold; the same
rows give the same state.
"""

from collections.abc import Iterable

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.store import observations as seen
from opengyre.store.codec import JournalValue
from opengyre.store.journal import Row
from opengyre.store.observations import Activity, Role
from opengyre.views.lanes import Stretch, extend
from opengyre.views.run_state import (
    EngineView,
    ExecutionView,
    GroupView,
    Happening,
    RunState,
    Sample,
)


class Fold:
    """Apply every row in order; `state` is right after each."""

    def __init__(self) -> None:
        self.state = RunState()
        self._core_trained_at_expose = False

    def apply(self, row: Row) -> None:
        self._pass_time(row.now_s)
        value = row.value
        if isinstance(value, c.Plan):
            for command in value.commands:
                self.state.commands[command.command_id] = command
                self._apply_command(command)
        else:
            self._apply_told(value)
        self._sample()

    def _pass_time(self, now_s: float) -> None:
        for engine in self.state.engines.values():
            activity = self._activity(engine)
            if activity is not None:
                extend(engine.lane, activity, self.state.now_s, now_s)
        self.state.now_s = max(self.state.now_s, now_s)

    def _activity(self, engine: EngineView) -> Activity | None:
        match engine.role:
            case Role.STARTING:
                return None
            case _ if self.state.is_ending:
                return Activity.IDLE_AT_END
            case _ if engine.is_publishing:
                return Activity.PUBLISHING
            case Role.LEAVING | Role.RETURNING | Role.LOST:
                return Activity.MOVING
            case Role.TRAINING:
                closing = self.state.is_closing_step and engine.cell == 0
                return Activity.TRAINING if closing else Activity.WAITING_FOR_DATA
            case _ if engine.live:
                return Activity.GENERATING
            case _:
                return self._why_idle(engine)

    def _why_idle(self, engine: EngineView) -> Activity:
        """An engine in rollout without executions: a cell that could train waits for coverage."""
        if self.state.started is None or engine.cell is None:
            return Activity.WAITING_FOR_SUPPLY
        size = self.state.started.groups_per_step
        supply = min(self.state.num_ready, size - self.state.num_assigned)
        has_supply = supply >= self.state.started.supply_fraction * size
        return Activity.WAITING_FOR_COVERAGE if has_supply else Activity.WAITING_FOR_SUPPLY

    def _sample(self) -> None:
        sample = Sample(
            at_s=self.state.now_s,
            waterlevel=self.state.counts.waterlevel,
            capacity=self.state.capacity,
            num_ready=self.state.num_ready,
            num_needed=self.state.num_needed,
        )
        if not self.state.samples or _levels(self.state.samples[-1]) != _levels(sample):
            self.state.samples.append(sample)

    def _mark(self, what: str, where: str, words: str) -> None:
        self.state.happenings.append(
            Happening(at_s=self.state.now_s, what=what, where=where, words=words)
        )

    def _apply_command(self, command: c.AnyCommand) -> None:
        match command:
            case c.DispatchGroups():
                self._boundary(command.burst)
                for group, members in command.groups:
                    view = GroupView(
                        group=group,
                        version=command.version,
                        burst=command.burst,
                        members=members,
                        num_open=len(members),
                    )
                    self.state.groups[group] = self.state.open_groups[group] = view
                    self._dispatch(command, members, group)
            case c.DispatchEval():
                self._boundary(command.burst)
                self._dispatch(command, command.executions, None)
            case c.Launch():
                self._launch(command.execution, command.engine)
            case c.Cancel(was_queued=True):
                self._launch(command.execution, None)
                self._close(command.execution, f.Outcome.CANCELLED)
            case c.Reroute():
                for execution, engine in command.moves:
                    self._place(execution, engine)
            case _:
                self._apply_role_command(command)

    def _apply_role_command(self, command: c.AnyCommand) -> None:
        match command:
            case c.CloseDoor():
                engine = self.state.engine(command.engine)
                if engine.cell is not None and engine.role is Role.ROLLOUT:
                    engine.role = Role.LEAVING
            case c.EnterTraining():
                self.state.engine_of_cell(command.cell).role = Role.LEAVING
            case c.LeaveTraining():
                self.state.engine_of_cell(command.cell).role = Role.RETURNING
                self._mark("returning", f"c{command.cell}", command.reason)
            case c.Publish():
                self.state.engine(command.engine).is_publishing = True
            case c.Expose():
                core = self.state.engine_of_cell(0)
                self._core_trained_at_expose = core.role is Role.TRAINING
            case _:
                self._apply_step_command(command)

    def _apply_step_command(self, command: c.AnyCommand) -> None:
        match command:
            case c.OpenStep():
                self.state.open_step, self.state.is_closing_step = command.step, False
            case c.CloseStep():
                self.state.is_closing_step = True
            case c.AbandonStep():
                self._leave_step(command.step, is_consumed=False)
            case c.EndRun():
                self.state.is_ending = True
            case _:
                return

    def _boundary(self, burst: int) -> None:
        """A burst begins; what became of a core that was training tells what was decided."""
        self.state.burst = burst
        if not self._core_trained_at_expose:
            return
        self._core_trained_at_expose = False
        is_retained = self.state.engine_of_cell(0).role is Role.TRAINING
        self.state.num_retained += is_retained
        self.state.num_returned += not is_retained
        self._mark("retained" if is_retained else "returned", "c0", f"burst {burst} begins")

    def _dispatch(
        self, command: c.DispatchGroups | c.DispatchEval, members: Iterable[str], group: str | None
    ) -> None:
        for execution in members:
            self.state.counts.dispatched += 1
            self.state.executions[execution] = ExecutionView(
                execution=execution,
                group=group,
                version=command.version,
                burst=command.burst,
                dispatched_s=self.state.now_s,
            )

    def _launch(self, execution: str, engine: str | None) -> None:
        one = self.state.executions.get(execution)
        if one is None or one.launched_s is not None:
            return
        one.launched_s = self.state.now_s
        self.state.counts.launched += 1
        if engine is not None:
            self._place(execution, engine)

    def _place(self, execution: str, engine: str) -> None:
        one = self.state.executions.get(execution)
        if one is None or one.outcome is not None:
            return
        if one.engine is not None:
            self.state.engine(one.engine).live.discard(execution)
        one.engine = engine
        self.state.engine(engine).live.add(execution)

    def _close(self, execution: str, outcome: f.Outcome) -> None:
        one = self.state.executions.get(execution)
        if one is None:
            return
        if one.outcome is not None:
            one.other_outcomes.append(outcome)
            return
        one.outcome, one.closed_s = outcome, self.state.now_s
        self.state.counts.finished += 1
        if one.engine is not None:
            self.state.engine(one.engine).live.discard(execution)
        self._settle(one)

    def _last_word(self, verdict: f.VerdictGiven) -> None:
        one = self.state.executions.get(verdict.execution)
        if one is None or one.has_last_word:
            return
        one.reward, one.verdict_reason = verdict.reward, verdict.reason
        one.has_last_word = True
        self._settle(one)

    def _settle(self, one: ExecutionView) -> None:
        """A member is done for its group once it is closed and has its last word."""
        if one.group is None or one.outcome is None or not one.has_last_word:
            return
        group = self.state.groups[one.group]
        group.num_open -= 1
        group.num_valid += one.reward is not None
        if self.state.is_void(group):
            self.state.open_groups.pop(group.group, None)

    def _leave_step(self, step: int, *, is_consumed: bool) -> None:
        for group in list(self.state.open_groups.values()):
            if group.assigned_step == step:
                self._assign(group.group, step if is_consumed else None, is_consumed=is_consumed)
        if self.state.open_step == step:
            self.state.open_step, self.state.is_closing_step = None, False

    def _assign(self, name: str, step: int | None, *, is_consumed: bool = False) -> None:
        group = self.state.groups.get(name)
        if group is None:
            return
        group.assigned_step, group.is_consumed = step, is_consumed
        if is_consumed:
            self.state.open_groups.pop(name, None)
        else:
            self.state.open_groups[name] = group

    def _apply_told(self, value: JournalValue) -> None:
        match value:
            case f.ExecutionClosed():
                self._close(value.execution, value.outcome)
            case f.VerdictGiven():
                self._last_word(value)
            case f.GroupAssigned():
                self._assign(value.group, value.step)
            case f.GroupReturned():
                self._assign(value.group, None)
            case f.StepCommitted():
                self._leave_step(value.step, is_consumed=True)
            case f.CommandApplied():
                self._applied(self.state.commands.get(value.command_id))
            case f.CommandFailed() | f.CommandUnknown():
                is_sure = isinstance(value, f.CommandFailed)
                self._failed(self.state.commands.get(value.command_id), is_sure=is_sure)
            case f.EngineReady() | f.EngineLost():
                self._apply_life(value)
            case _:
                self._apply_observation(value)

    def _apply_life(self, value: f.EngineReady | f.EngineLost) -> None:
        engine = self.state.engine(value.engine)
        engine.is_publishing = engine.is_quarantined = False
        if isinstance(value, f.EngineReady):
            engine.role = Role.ROLLOUT
            return
        engine.role = Role.LOST
        engine.live.clear()
        self._mark("lost", value.engine, value.reason)

    def _applied(self, command: c.AnyCommand | None) -> None:
        match command:
            case c.EnterTraining():
                self.state.engine_of_cell(command.cell).role = Role.TRAINING
                self.state.num_role_changes += 1
                self._mark("training", f"c{command.cell}", command.reason)
            case c.LeaveTraining():
                self.state.num_role_changes += 1
            case c.OpenDoor():
                engine = self.state.engine(command.engine)
                if engine.role is not Role.TRAINING:
                    engine.role = Role.ROLLOUT
            case c.Publish():
                engine = self.state.engine(command.engine)
                engine.is_publishing, engine.is_quarantined = False, False
            case _:
                return

    def _failed(self, command: c.AnyCommand | None, *, is_sure: bool) -> None:
        match command:
            case c.Publish():
                engine = self.state.engine(command.engine)
                engine.is_publishing, engine.is_quarantined = False, True
            case c.Launch() if is_sure:
                self._close(command.execution, f.Outcome.FAILED)
            case _:
                return

    def _apply_observation(self, value: JournalValue) -> None:
        match value:
            case seen.RunStarted():
                self.state.started = value
                for spec in value.engines:
                    self.state.engines.setdefault(
                        spec.engine,
                        EngineView(engine=spec.engine, cell=spec.cell, slots=spec.slots),
                    )
            case seen.RunEnded():
                self.state.ended = value
            case seen.LaunchRecorded():
                one = self.state.executions.get(value.execution)
                if one is not None:
                    one.task, one.num_launches = value.task, value.launch_number
            case seen.TurnRecorded():
                self.state.turns[value.turn.turn, value.turn.attempt] = value.turn
            case seen.StepReport():
                self.state.steps.append(value)
            case seen.EvalResult():
                self.state.evals.append((self.state.now_s, value))
            case seen.HarnessError():
                self.state.harness_errors.append(value)
            case _:
                self._apply_movement(value)

    def _apply_movement(self, value: JournalValue) -> None:
        match value:
            case seen.Continued():
                self.state.continued.append((self.state.now_s, value))
                self._mark("continued", value.to_engine, f"{value.turn}: {value.reason}")
            case seen.MemberJoined():
                self.state.joins.append((self.state.now_s, value))
                words = "mid-batch" if value.is_mid_batch else f"step {value.step}"
                self._mark("join", f"c{value.cell}", words)
            case seen.VersionPublished():
                self.state.published.append((self.state.now_s, value))
                self._mark("published", value.engine, f"version {value.version}")
            case seen.MicroStepDone():
                self.state.micro_steps.setdefault(f"c{value.cell}", []).append(
                    Stretch(
                        activity=Activity.TRAINING,
                        start_s=self.state.now_s - value.run_s,
                        end_s=self.state.now_s,
                    )
                )
            case seen.ActivitySpan():
                self.state.measured.setdefault(value.engine, []).append(
                    Stretch(activity=value.activity, start_s=value.start_s, end_s=value.end_s)
                )
            case _:
                return


def fold(rows: Iterable[Row]) -> RunState:
    """The state after `rows`."""
    one = Fold()
    for row in rows:
        one.apply(row)
    return one.state


def _levels(sample: Sample) -> tuple[int, int, int, int]:
    return (sample.waterlevel, sample.capacity, sample.num_ready, sample.num_needed)
