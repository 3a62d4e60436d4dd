"""A simulated run: the scheduler's commands are answered after what they cost.

Owns: the loop, the answer to each command, versions, failures. Must not know: the policy; it sees
plans. Invariants: facts reach the scheduler in order at the moment they are true; commands of one
engine are answered in order; a dead process answers nothing; an event costs O(log n), whatever
the number of engines.
"""

from collections.abc import Callable
from functools import partial

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.config import EngineSpec
from opengyre.control.errors import InvariantError
from opengyre.control.ids import CommandId, EngineId, GroupId
from opengyre.control.scheduler import Scheduler
from opengyre.simulate.accounts import Account, Books
from opengyre.simulate.fleet import Fleet, FleetParts
from opengyre.simulate.kernel import Kernel
from opengyre.simulate.result import Mode, Result
from opengyre.simulate.rollout import RolloutEngine
from opengyre.simulate.scenario import Failure, Scenario
from opengyre.simulate.stream import CORE, Stream, StreamParts

Sink = Callable[[float, f.Fact | c.Plan], None]

MAX_ROUNDS_AT_ONCE = 100_000


def simulate(scenario: Scenario, seed: int, *, journal: Sink | None = None) -> Result:
    """Run `scenario` to its end. `journal(now_s, value)` sees every fact and plan in order.

    The same scenario and seed give the same Result and the same journal. Raises InvariantError if
    the run does not end within `scenario.max_s`, or a rule of our own is broken.
    """
    return World(scenario, seed, journal).run()


class World:
    def __init__(self, scenario: Scenario, seed: int, journal: Sink | None) -> None:
        self._scenario, self._seed, self._journal = scenario, seed, journal
        self._config, self._costs = scenario.scheduler, scenario.costs
        self._scheduler = Scheduler(self._config)
        self._kernel = Kernel()
        self._inbox: list[f.Fact] = []
        self._end: c.EndRun | None = None
        specs = self._config.engines
        self._books = Books([_account(scenario, spec) for spec in specs])
        self._cell_engine = {spec.cell: spec.engine for spec in specs if spec.cell is not None}
        self._cell_of = {spec.engine: spec.cell for spec in specs}
        self._incarnation = dict.fromkeys(self._cell_of, 0)
        self._is_alive = dict.fromkeys(self._cell_of, False)
        self._line_free_s = dict.fromkeys(self._cell_of, 0.0)
        self._fleet = self._make_fleet()
        self._stream = self._make_stream()
        self._published_version = self._durable_version = self._config.initial_version
        self._version_by_group: dict[GroupId, int] = {}
        self._consumed: dict[int, tuple[float, int, tuple[GroupId, ...]]] = {}
        self._num_groups = 0
        self._num_events = self._num_switches = self._num_publications = 0

    def _make_fleet(self) -> Fleet:
        costs = self._costs
        engines = [
            RolloutEngine(
                engine=spec.engine, slots=spec.slots, costs=costs.engine, tools=costs.tools
            )
            for spec in self._config.engines
        ]
        parts = FleetParts(
            kernel=self._kernel,
            costs=costs,
            workload=self._scenario.workload,
            seed=self._seed,
            books=self._books,
            tell=self._inbox.append,
        )
        return Fleet(parts, engines)

    def _make_stream(self) -> Stream:
        costs = self._costs.training
        return Stream(
            StreamParts(
                kernel=self._kernel,
                costs=costs,
                max_groups=self._config.groups_per_step,
                tell=self._inbox.append,
                weigh=self._fleet.weigh if costs.is_by_length else _weigh_equal,
                work_on=lambda devices: self._books.set_working(devices, self._kernel.now_s),
                committed=self._committed,
            )
        )

    # ---- the loop

    def run(self) -> Result:
        for engine in self._cell_of:
            self._start(engine)
        for failure in self._scenario.failures:
            self._kernel.at(failure.at_s, partial(self._fail, failure))
        num_rounds, last_s = 0, -1.0
        while self._end is None:
            self._observe_and_decide()
            if not self._inbox and self._end is None:
                self._advance()
            num_rounds = num_rounds + 1 if self._kernel.now_s == last_s else 0
            last_s = self._kernel.now_s
            if num_rounds > MAX_ROUNDS_AT_ONCE:
                raise InvariantError(f"{self._scenario.name}: time stands still at {last_s} s")
        return self._result(self._end)

    def _observe_and_decide(self) -> None:
        now_s, facts = self._kernel.now_s, self._inbox[:]
        self._inbox.clear()
        for fact in facts:
            if self._journal is not None:
                self._journal(now_s, fact)
            self._scheduler.observe(fact, now_s)
        plan = self._scheduler.decide(now_s)
        if self._journal is not None:
            self._journal(now_s, plan)
        self._num_events += len(facts) + 1
        for command in plan.commands:
            self._apply(command)

    def _advance(self) -> None:
        """To the next event, or to the scheduler's own timer if that is earlier."""
        wakeup_s, next_s = self._scheduler.next_wakeup_s(), self._kernel.next_s
        if next_s is None and wakeup_s is None:
            waiting = self._scheduler.snapshot().waiting_for
            raise InvariantError(f"{self._scenario.name}: nothing will ever happen: {waiting}")
        if next_s is None or (wakeup_s is not None and wakeup_s < next_s):
            self._kernel.pass_to(wakeup_s or 0.0)
        else:
            self._kernel.run_next()
            while self._kernel.next_s == self._kernel.now_s:
                self._kernel.run_next()
        if self._kernel.now_s > self._scenario.max_s:
            raise InvariantError(f"{self._scenario.name}: no end after {self._scenario.max_s} s")

    # ---- commands

    def _apply(self, command: c.AnyCommand) -> None:
        match command:
            case c.Launch():
                self._fleet.launch(command.execution, command.engine)
                self._answer(command.command_id)
            case c.Cancel():
                self._fleet.cancel(command.execution, was_queued=command.was_queued)
                self._answer(command.command_id)
            case c.DispatchGroups():
                self._dispatch(command)
            case c.DispatchEval():
                self._fleet.dispatch_eval(command.executions)
                self._answer(command.command_id)
            case c.EndRun():
                self._end = command
            case c.Fence():
                self._kill(command.engine, "it was fenced", self._costs.engine.restart_s)
                self._answer(command.command_id)
            case c.CloseDoor() | c.Freeze() | c.OpenDoor() | c.Publish() | c.Reroute():
                self._apply_to_engine(command)
            case c.EnterTraining() | c.LeaveTraining():
                self._apply_to_cell(command)
            case _:
                self._apply_to_step(command)

    def _apply_to_engine(
        self, command: c.CloseDoor | c.Freeze | c.OpenDoor | c.Publish | c.Reroute
    ) -> None:
        match command:
            case c.CloseDoor():
                self._be(command.engine, Mode.MOVING)
                self._in_line(command.engine, 0.0, command)
            case c.Reroute():
                self._fleet.move(command.moves)
                self._answer(command.command_id)
            case c.Freeze():
                self._in_line(command.engine, self._costs.engine.freeze_s, command)
            case c.OpenDoor():
                self._in_line(command.engine, 0.0, command, lambda: self._serve(command.engine))
            case c.Publish():
                load_s = self._costs.publication.load_s
                self._num_publications += 1
                self._be(command.engine, Mode.PUBLISHING)
                self._fleet.publish(command.engine, load_s)
                self._in_line(command.engine, load_s, command, lambda: self._serve(command.engine))

    def _apply_to_cell(self, command: c.EnterTraining | c.LeaveTraining) -> None:
        engine, costs = self._cell_engine[command.cell], self._costs.switch
        self._be(engine, Mode.MOVING)
        if isinstance(command, c.EnterTraining):
            self._in_line(engine, costs.enter_training_s, command, lambda: self._entered(engine))
            return
        load_s = 0.0 if command.cell == CORE else costs.load_s
        self._in_line(engine, costs.leave_training_s + load_s, command)

    def _apply_to_step(
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
        match command:
            case c.Offer():
                self._stream.offer(command.step, command.groups)
                self._answer(command.command_id)
            case c.CloseStep():
                self._stream.close(command)
            case c.DropMember():
                self._drop(command)
            case c.AbandonStep():
                self._stream.abandon(command.step)
                self._answer(command.command_id)
            case c.Admit():
                self._admit(command)
            case c.OpenStep() | c.Checkpoint() | c.Expose():
                self._apply_to_core(command)

    def _apply_to_core(self, command: c.OpenStep | c.Checkpoint | c.Expose) -> None:
        """The core writes or exposes weights, in whatever role it is."""
        core = self._cell_engine[CORE]
        is_training = self._books.by_engine[core].mode is Mode.TRAINING
        costs, devices = self._costs, self._scenario.devices_per_cell
        match command:
            case c.OpenStep():
                cost_s = costs.training.open_s
            case c.Checkpoint():
                cost_s = costs.checkpoint.save_s
            case c.Expose():
                cost_s = costs.publication.expose_s
        if is_training:
            self._books.set_saving(devices, self._kernel.now_s)
        self._later(core, cost_s, lambda: self._core_did(command))

    def _core_did(self, command: c.OpenStep | c.Checkpoint | c.Expose) -> None:
        self._books.set_saving(0, self._kernel.now_s)
        match command:
            case c.OpenStep():
                self._stream.open(command.step, command.version, self._scenario.devices_per_cell)
            case c.Checkpoint():
                self._durable_version = command.version
            case c.Expose():
                self._published_version = command.version
        self._answer(command.command_id)

    def _dispatch(self, command: c.DispatchGroups) -> None:
        self._fleet.dispatch(command.groups)
        self._num_groups += len(command.groups)
        needed = self._config.num_steps * self._config.groups_per_step
        self._books.now.is_all_dispatched = self._num_groups >= needed
        self._version_by_group.update((group, command.version) for group, _ in command.groups)
        self._answer(command.command_id)

    def _admit(self, command: c.Admit) -> None:
        engine = self._cell_engine[command.cell]
        account = self._books.by_engine[engine]
        self._books.begin_join(account, self._kernel.now_s)
        self._later(engine, self._costs.switch.join_s, lambda: self._joined(command, account))

    def _joined(self, command: c.Admit, account: Account) -> None:
        self._books.end_join(account, self._kernel.now_s)
        if self._stream.admit(command.step, command.cell, account.devices):
            self._inbox.append(f.MemberAdmitted(step=command.step, cell=command.cell))
        self._answer(command.command_id)

    def _drop(self, command: c.DropMember) -> None:
        engine = self._cell_engine[command.cell]
        self._books.end_join(self._books.by_engine[engine], self._kernel.now_s)
        self._stream.drop(command.step, command.cell)
        self._answer(command.command_id)

    def _committed(self, step: int, version: int, groups: tuple[GroupId, ...]) -> None:
        """The step's one update is made; nothing more is wanted after the last."""
        self._consumed[step] = (self._kernel.now_s, version, groups)
        last_step = self._scenario.stop_after_step or self._config.num_steps
        if step < last_step:
            return
        self._books.settle(self._kernel.now_s)
        self._books.now.is_over = True
        if last_step < self._config.num_steps:
            self._inbox.append(f.StopRequested(reason=f"step {step} was to be the last"))

    # ---- answers

    def _answer(self, command_id: CommandId) -> None:
        self._inbox.append(f.CommandApplied(command_id=command_id))

    def _in_line(
        self,
        engine: EngineId,
        cost_s: float,
        command: c.Command,
        effect: Callable[[], None] | None = None,
    ) -> None:
        """After what `engine` was told before, and `cost_s`: the effect, then the answer."""
        now_s = self._kernel.now_s
        ends_s = max(now_s, self._line_free_s[engine]) + cost_s
        self._line_free_s[engine] = ends_s

        def answer() -> None:
            if effect is not None:
                effect()
            self._answer(command.command_id)

        self._later(engine, ends_s - now_s, answer)

    def _later(self, engine: EngineId, cost_s: float, action: Callable[[], None]) -> None:
        """At once if it costs nothing; never if the process dies before."""
        if cost_s <= 0:
            action()
            return
        incarnation = self._incarnation[engine]

        def act() -> None:
            if self._is_alive[engine] and self._incarnation[engine] == incarnation:
                action()

        self._kernel.after(cost_s, act)

    # ---- engines

    def _be(self, engine: EngineId, mode: Mode) -> None:
        self._books.change_mode(self._books.by_engine[engine], mode, self._kernel.now_s)

    def _serve(self, engine: EngineId) -> None:
        self._be(engine, Mode.ROLLOUT)

    def _entered(self, engine: EngineId) -> None:
        self._num_switches += 1
        self._be(engine, Mode.TRAINING)

    def _start(self, engine: EngineId) -> None:
        if self._is_alive[engine]:
            return
        self._is_alive[engine] = True
        self._incarnation[engine] += 1
        self._line_free_s[engine] = self._kernel.now_s
        self._be(engine, Mode.MOVING)
        is_core = self._cell_of[engine] == CORE
        version = self._durable_version if is_core else self._published_version
        self._inbox.append(
            f.EngineReady(engine=engine, incarnation=self._incarnation[engine], version=version)
        )

    def _fail(self, failure: Failure) -> None:
        self._kill(failure.engine, "a planned failure", failure.restart_after_s)

    def _kill(self, engine: EngineId, reason: str, restart_after_s: float | None) -> None:
        if not self._is_alive[engine]:
            return
        self._is_alive[engine] = False
        self._fleet.displace(engine)
        cell = self._cell_of[engine]
        if cell is not None:
            self._stream.lose(cell)
        if cell == CORE:
            self._books.set_saving(0, self._kernel.now_s)
        self._be(engine, Mode.LOST)
        self._inbox.append(
            f.EngineLost(engine=engine, incarnation=self._incarnation[engine], reason=reason)
        )
        if restart_after_s is not None:
            self._kernel.after(restart_after_s, lambda: self._start(engine))

    # ---- the end

    def _result(self, end: c.EndRun) -> Result:
        now_s, books, tally = self._kernel.now_s, self._books, self._fleet.tally
        books.close(now_s)
        seen = self._scheduler.snapshot()
        role_s, generating_s = books.training_role_s, books.serving_slot_s
        return Result(
            name=self._scenario.name,
            seed=self._seed,
            num_devices=self._scenario.num_devices,
            wall_s=now_s,
            step_times=tuple(at_s for at_s, _, _ in self._in_order()),
            num_steps=seen.steps_done,
            num_events=self._num_events,
            device_seconds=books.seconds_by_bucket,
            slack=books.training_idle_s / role_s if role_s > 0 else 0.0,
            occupancy=books.used_slot_s / generating_s if generating_s > 0 else 0.0,
            staleness=self._staleness(),
            num_dispatched=tally.num_dispatched,
            outcomes=tally.num_by_outcome,
            num_moves=tally.num_moves,
            num_replaced=tally.num_replaced,
            num_switches=self._num_switches,
            num_publications=self._num_publications,
            stalled_s=tally.stalled_s,
            recomputed_tokens=tally.recomputed_tokens,
            kv_moved_tokens=tally.kv_moved_tokens,
            aborted_s=round(self._fleet.aborted_s, 3) + 0.0,
            cancelled_s=tally.cancelled_s,
            num_short=seen.num_short_steps,
            num_empty=seen.num_empty_steps,
            num_void=seen.num_void,
            num_dropped=seen.num_dropped,
            failed=end.failed,
            reason=end.reason,
            lanes=tuple(books.lanes),
            num_left_out=books.num_left_out,
        )

    def _in_order(self) -> list[tuple[float, int, tuple[GroupId, ...]]]:
        return [self._consumed[step] for step in sorted(self._consumed)]

    def _staleness(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for _, version, groups in self._in_order():
            for group in groups:
                age = version - self._version_by_group[group]
                counts[age] = counts.get(age, 0) + 1
        return dict(sorted(counts.items()))


def _account(scenario: Scenario, spec: EngineSpec) -> Account:
    is_cell = spec.cell is not None
    devices = scenario.devices_per_cell if is_cell else scenario.devices_per_standalone
    return Account(engine=spec.engine, is_cell=is_cell, devices=devices, slots=spec.slots)


def _weigh_equal(group: GroupId) -> float:
    return 1.0
