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
from opengyre.views.fold_engines import EngineFold
from opengyre.views.fold_work import WorkFold
from opengyre.views.lanes import Stretch
from opengyre.views.run_state import EngineView, RunState, Sample


class Fold:
    """Apply every row in order; `state` is right after each."""

    def __init__(self) -> None:
        self.state = RunState()
        self._engines = EngineFold(self.state)
        self._work = WorkFold(self.state)
        self._is_exposed = False
        self._core_trained_at_expose = False

    def apply(self, row: Row) -> None:
        now_s = max(self.state.now_s, row.now_s)
        self._engines.pass_time(now_s)
        self.state.now_s = now_s
        if isinstance(row.value, c.Plan):
            self._apply_plan(row.value)
        else:
            self._apply_told(row.value)
        self._sample()

    def _apply_plan(self, plan: c.Plan) -> None:
        self._engines.quarantine_late()
        for command in plan.commands:
            self.state.commands[command.command_id] = command
            self._engines.take_command(command)
            self._work.take_command(command)
            if isinstance(command, c.Fence):
                self._lost(command.engine)
        if self._is_exposed:
            self._boundary()

    def _boundary(self) -> None:
        """The first plan after the weights were exposed; what the core does next was decided."""
        self._is_exposed = False
        if not self._core_trained_at_expose:
            return
        is_retained = self.state.engine_of_cell(0).role is Role.TRAINING
        self.state.num_retained += is_retained
        self.state.num_returned += not is_retained
        what = "retained" if is_retained else "returned"
        self._engines.mark(what, "c0", f"burst {self.state.burst} begins")

    def _lost(self, engine: str) -> None:
        if self.state.engine(engine).cell == 0:
            self._is_exposed = False
            self._work.lose_core()

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

    def _apply_told(self, value: JournalValue) -> None:
        match value:
            case f.ExecutionClosed():
                self._work.close(value.execution, value.outcome)
            case f.VerdictGiven():
                self._work.give_verdict(value)
            case f.GroupAssigned():
                self._work.assign(value)
            case f.GroupReturned():
                self._work.give_back(value)
            case f.StepCommitted():
                self._work.commit(value.step)
            case f.CommandApplied() | f.CommandFailed() | f.CommandUnknown():
                self._answered(value)
            case f.EngineReady() | f.EngineLost():
                was_there = self.state.engine(value.engine).role not in (Role.STARTING, Role.LOST)
                if self._engines.take_life(value) and was_there:
                    self._lost(value.engine)
            case _:
                self._apply_observation(value)

    def _answered(self, fact: f.CommandApplied | f.CommandFailed | f.CommandUnknown) -> None:
        command = self._engines.answer(fact.command_id)
        match (fact, command):
            case (_, None):
                return
            case (f.CommandFailed(), c.Launch()):
                self._work.close(command.execution, f.Outcome.FAILED, is_last_word=True)
            case (f.CommandApplied(), c.Checkpoint()):
                self._work.make_durable()
            case (f.CommandApplied(), c.Expose()):
                self._is_exposed = True
                core = self.state.engine_of_cell(0)
                self._core_trained_at_expose = core.role is Role.TRAINING
            case (f.CommandApplied(), _):
                self._engines.applied(command)
            case _:
                return

    def _apply_observation(self, value: JournalValue) -> None:
        match value:
            case seen.RunStarted():
                self.state.started = value
                num_fixed = int(value.scheduler.get("num_training_cells", 0))
                for spec in value.engines:
                    view = EngineView(
                        engine=spec.engine,
                        cell=spec.cell,
                        slots=spec.slots,
                        always_trains=spec.cell is not None and spec.cell < num_fixed,
                    )
                    self.state.engines.setdefault(spec.engine, view)
            case seen.RunEnded():
                self.state.ended = value
            case seen.LaunchRecorded():
                self._work.begin_launch(value)
            case seen.TurnRecorded():
                self._work.record(value.turn)
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
                self._engines.mark("continued", value.to_engine, f"{value.turn}: {value.reason}")
            case seen.Handoff():
                self.state.handoffs.setdefault(value.ref, []).append(value)
            case seen.GatewayLost():
                self.state.gateways_lost.append(value)
                self.state.retold.update(value.retold)
                self._forget_cut_calls(value)
            case seen.MemberJoined():
                self.state.joins.append((self.state.now_s, value))
                words = "mid-batch" if value.is_mid_batch else f"step {value.step}"
                self._engines.mark("join", f"c{value.cell}", words)
            case seen.VersionPublished():
                self.state.published.append((self.state.now_s, value))
                self._engines.mark("published", value.engine, f"version {value.version}")
            case seen.RoleChange():
                self.state.role_changes.append(value)
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

    def _forget_cut_calls(self, lost: seen.GatewayLost) -> None:
        """Continuations of calls that ended with their gateway: no turn will tell of them."""
        state, executions = self.state, set(lost.executions)
        state.continued = [
            (at_s, one)
            for at_s, one in state.continued
            if one.execution not in executions or (one.turn, one.attempt) in state.turns
        ]


def fold(rows: Iterable[Row]) -> RunState:
    """The state after `rows`."""
    one = Fold()
    for row in rows:
        one.apply(row)
    return one.state


def _levels(sample: Sample) -> tuple[int, int, int, int]:
    return (sample.waterlevel, sample.capacity, sample.num_ready, sample.num_needed)
