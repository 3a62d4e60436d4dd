"""What each command does in the simulated world, and when it is answered.

Owns: the effect and the cost of every command, versions, planned failures. Must not know: why a
command was given; the policy, but for the words in which free slots are booked.
Invariants: each command is answered once, unless its process died; commands of one engine are
answered in order.
"""

from collections.abc import Callable
from functools import partial
from typing import assert_never

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.config import EngineSpec, PolicyName, SchedulerConfig
from opengyre.control.ids import CommandId, EngineId, GroupId
from opengyre.simulate.accounts import Account, Books
from opengyre.simulate.fleet import Fleet, FleetParts
from opengyre.simulate.kernel import Kernel
from opengyre.simulate.processes import Processes
from opengyre.simulate.result import Mode
from opengyre.simulate.rollout import RolloutEngine
from opengyre.simulate.scenario import Failure, Scenario
from opengyre.simulate.step_book import Committed, StepBook
from opengyre.simulate.stream import CORE, Stream, StreamParts

FleetCommand = c.Launch | c.Cancel | c.DispatchGroups | c.DispatchEval
EngineCommand = c.CloseDoor | c.Freeze | c.OpenDoor | c.Publish | c.Reroute
StreamCommand = c.Admit | c.Offer | c.CloseStep | c.DropMember | c.AbandonStep
CoreCommand = c.OpenStep | c.Checkpoint | c.Expose


class Shell:
    """`start` brings every engine up; `apply` takes each command of a plan in order."""

    def __init__(
        self, scenario: Scenario, seed: int, *, kernel: Kernel, tell: Callable[[f.Fact], None]
    ) -> None:
        self._scenario, self._kernel, self._tell = scenario, kernel, tell
        self._config, self._costs = scenario.scheduler, scenario.costs
        specs = self._config.engines
        self._engine_of = {spec.cell: spec.engine for spec in specs if spec.cell is not None}
        self._cell_of = {spec.engine: spec.cell for spec in specs}
        self._published_version = self._durable_version = self._config.initial_version
        self.books = Books(
            [_account(scenario, spec) for spec in specs],
            leaving_slots=_leaving_slots(self._config),
        )
        self.steps = StepBook()
        self.fleet = self._make_fleet(seed)
        self.stream = self._make_stream()
        self._processes = Processes(
            self._cell_of, kernel=kernel, tell=tell, version_of=self._version_of
        )
        self.num_switches = self.num_publications = 0

    def _make_fleet(self, seed: int) -> Fleet:
        costs = self._costs
        engines = [
            RolloutEngine(
                engine=spec.engine,
                devices=self.books.by_engine[spec.engine].devices,
                slots=spec.slots,
                costs=costs.engine,
                tools=costs.tools,
            )
            for spec in self._config.engines
        ]
        parts = FleetParts(
            kernel=self._kernel,
            costs=costs,
            workload=self._scenario.workload,
            seed=seed,
            books=self.books,
            tell=self._tell,
        )
        return Fleet(parts, engines)

    def _make_stream(self) -> Stream:
        costs = self._costs.training
        return Stream(
            StreamParts(
                kernel=self._kernel,
                costs=costs,
                max_groups=self._config.groups_per_step,
                tell=self._tell,
                weigh=self.fleet.weigh if costs.is_by_length else _weigh_equal,
                work_on=lambda devices: self.books.set_working(devices, self._kernel.now_s),
                committed=self._committed,
            )
        )

    def start(self) -> None:
        for engine in self._cell_of:
            self._start(engine)
        for failure in self._scenario.failures:
            self._kernel.at(failure.at_s, partial(self._fail, failure))

    def apply(self, command: c.AnyCommand) -> None:
        match command:
            case c.Launch() | c.Cancel() | c.DispatchGroups() | c.DispatchEval():
                self._apply_to_fleet(command)
            case c.EnterTraining() | c.LeaveTraining():
                self._apply_to_cell(command)
            case c.OpenStep() | c.Checkpoint() | c.Expose():
                self._apply_to_core(command)
            case c.Admit() | c.Offer() | c.CloseStep() | c.DropMember() | c.AbandonStep():
                self._apply_to_stream(command)
            case c.CloseDoor() | c.Freeze() | c.OpenDoor() | c.Publish() | c.Reroute():
                self._apply_to_engine(command)
            case c.Fence():
                self._kill(command.engine, "it was fenced", self._costs.engine.restart_s)
                self._answer(command.command_id)
            case c.EndRun():
                return
            case _:
                assert_never(command)

    def _apply_to_fleet(self, command: FleetCommand) -> None:
        match command:
            case c.Launch():
                self.fleet.launch(command.execution, command.engine)
            case c.Cancel():
                self.fleet.cancel(command.execution, was_queued=command.was_queued)
            case c.DispatchGroups():
                self._dispatch(command)
            case c.DispatchEval():
                self.fleet.dispatch_eval(command.executions)
        self._answer(command.command_id)

    def _dispatch(self, command: c.DispatchGroups) -> None:
        self.fleet.dispatch(command.groups)
        self.steps.dispatch((group for group, _ in command.groups), command.version)
        needed = self._config.num_steps * self._config.groups_per_step
        self.books.now.is_all_dispatched = self.steps.num_groups >= needed

    def _apply_to_engine(self, command: EngineCommand) -> None:
        costs = self._costs
        match command:
            case c.CloseDoor():
                self._be(command.engine, Mode.MOVING)
                self._in_line(command.engine, 0.0, command)
            case c.Reroute():
                self.fleet.move(command.moves)
                self._answer(command.command_id)
            case c.Freeze():
                self._in_line(command.engine, costs.engine.freeze_s, command)
            case c.OpenDoor():
                self._in_line(command.engine, 0.0, command, becomes=Mode.ROLLOUT)
            case c.Publish():
                load_s = costs.publication.load_s
                self.num_publications += 1
                self._be(command.engine, Mode.PUBLISHING)
                self.fleet.publish(command.engine, load_s)
                self._in_line(command.engine, load_s, command, becomes=Mode.ROLLOUT)

    def _apply_to_cell(self, command: c.EnterTraining | c.LeaveTraining) -> None:
        engine, costs = self._engine_of[command.cell], self._costs.switch
        self._be(engine, Mode.MOVING)
        if isinstance(command, c.EnterTraining):
            self._in_line(engine, costs.enter_training_s, command, becomes=Mode.TRAINING)
            return
        load_s = 0.0 if command.cell == CORE else costs.load_s
        self._in_line(engine, costs.leave_training_s + load_s, command)

    def _apply_to_stream(self, command: StreamCommand) -> None:
        match command:
            case c.Offer():
                self.stream.offer(command.step, command.groups)
                self._answer(command.command_id)
            case c.CloseStep():
                self.stream.close(command)
            case c.Admit():
                self._admit(command)
            case c.DropMember():
                account = self.books.by_engine[self._engine_of[command.cell]]
                self.books.end_join(account, self._kernel.now_s)
                self.stream.drop(command.step, command.cell)
                self._answer(command.command_id)
            case c.AbandonStep():
                self.stream.abandon(command.step)
                self._answer(command.command_id)

    def _apply_to_core(self, command: CoreCommand) -> None:
        """The core writes or exposes weights, in whatever role it is."""
        core, costs = self._engine_of[CORE], self._costs
        match command:
            case c.OpenStep():
                cost_s = costs.training.open_s
            case c.Checkpoint():
                cost_s = costs.checkpoint.save_s
            case c.Expose():
                cost_s = costs.publication.expose_s
        if self.books.by_engine[core].mode is Mode.TRAINING:
            self.books.set_saving(self._scenario.devices_per_cell, self._kernel.now_s)
        self._processes.later(core, cost_s, lambda: self._core_did(command))

    def _core_did(self, command: CoreCommand) -> None:
        self.books.set_saving(0, self._kernel.now_s)
        match command:
            case c.OpenStep():
                self.stream.open(command.step, command.version, self._scenario.devices_per_cell)
            case c.Checkpoint():
                self._durable_version = command.version
            case c.Expose():
                self._published_version = command.version
        self._answer(command.command_id)

    def _admit(self, command: c.Admit) -> None:
        engine = self._engine_of[command.cell]
        account = self.books.by_engine[engine]
        self.books.begin_join(account, self._kernel.now_s)
        join_s = self._costs.switch.join_s
        self._processes.later(engine, join_s, lambda: self._joined(command, account))

    def _joined(self, command: c.Admit, account: Account) -> None:
        self.books.end_join(account, self._kernel.now_s)
        if self.stream.admit(command.step, command.cell, account.devices):
            self._tell(f.MemberAdmitted(step=command.step, cell=command.cell))
        self._answer(command.command_id)

    def _committed(self, step: int, version: int, groups: tuple[GroupId, ...]) -> None:
        """The step's one update is made; nothing more is wanted after the last."""
        now_s = self._kernel.now_s
        self.steps.commit(step, Committed(at_s=now_s, version=version, groups=groups))
        last_step = self._scenario.stop_after_step or self._config.num_steps
        if step < last_step:
            return
        self.books.settle(now_s)
        self.books.now.is_over = True
        if last_step < self._config.num_steps:
            self._tell(f.StopRequested(reason=f"step {step} was to be the last"))

    # ---- answers

    def _answer(self, command_id: CommandId) -> None:
        self._tell(f.CommandApplied(command_id=command_id))

    def _in_line(
        self, engine: EngineId, cost_s: float, command: c.Command, *, becomes: Mode | None = None
    ) -> None:
        """Answered after what `engine` was told before and `cost_s`; then its mode changes."""

        def answer() -> None:
            if becomes is not None:
                self._be(engine, becomes)
                self.num_switches += becomes is Mode.TRAINING
            self._answer(command.command_id)

        self._processes.in_line(engine, cost_s, answer)

    # ---- engines

    def _be(self, engine: EngineId, mode: Mode) -> None:
        self.books.change_mode(self.books.by_engine[engine], mode, self._kernel.now_s)

    def _version_of(self, engine: EngineId) -> int:
        is_core = self._cell_of[engine] == CORE
        return self._durable_version if is_core else self._published_version

    def _start(self, engine: EngineId) -> None:
        if not self._processes.is_alive(engine):
            self._be(engine, Mode.MOVING)
            self._processes.start(engine)

    def _fail(self, failure: Failure) -> None:
        self._kill(failure.engine, "a planned failure", failure.restart_after_s)

    def _kill(self, engine: EngineId, reason: str, restart_after_s: float | None) -> None:
        if not self._processes.is_alive(engine):
            return
        self._processes.kill(engine, reason)
        self.fleet.displace(engine)
        cell = self._cell_of[engine]
        if cell is not None:
            self.stream.lose(cell)
        if cell == CORE:
            self.books.set_saving(0, self._kernel.now_s)
        self._be(engine, Mode.LOST)
        if restart_after_s is not None:
            self._kernel.after(restart_after_s, lambda: self._start(engine))


def _account(scenario: Scenario, spec: EngineSpec) -> Account:
    is_cell = spec.cell is not None
    devices = scenario.devices_per_cell if is_cell else scenario.devices_per_standalone
    return Account(engine=spec.engine, is_cell=is_cell, devices=devices, slots=spec.slots)


def _leaving_slots(config: SchedulerConfig) -> int | None:
    """What the books need to say why a slot is free; cells are taken to be alike."""
    slots = [spec.slots for spec in config.engines if spec.cell is not None]
    match config.policy:
        case PolicyName.ELASTIC:
            return max(slots)
        case PolicyName.COLOCATE:
            return sum(slots)
        case PolicyName.ASYNC:
            return None
        case _:
            assert_never(config.policy)


def _weigh_equal(group: GroupId) -> float:
    return 1.0
