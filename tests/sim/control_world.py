"""A little world around the scheduler: it answers commands late, wrongly or not at all.

Owns: time, engines, executions and the stream as the shell would have them, and its own naive
copy of every count. Must not know: the scheduler's inside; it sees plans and the snapshot.
Invariants are checked after each event against the world's own books.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.config import PolicyName, SchedulerConfig
from opengyre.control.ids import EngineId, ExecutionId, GroupId
from opengyre.control.scheduler import Scheduler
from opengyre.control.view import SchedulerView


@dataclass(frozen=True, kw_only=True)
class Weather:
    """Rates are probabilities per command or per execution; times are seconds. `flat_rate` is the
    share of groups whose values are equal, `excluded_rate` that of verdicts that do not count."""

    seed: int = 0
    answer_s: float = 0.2
    execution_s: float = 20.0
    group_work_s: float = 2.0
    straggler_rate: float = 0.0
    fail_rate: float = 0.0
    void_rate: float = 0.0
    no_verdict_rate: float = 0.05
    flat_rate: float = 0.0
    excluded_rate: float = 0.0
    untrainable_rate: float = 0.0
    deaths: int = 0
    restart_s: float = 5.0
    never_restarts_rate: float = 0.0
    doubled_rate: float = 0.0
    slow_publish_rate: float = 0.0
    horizon_s: float = 200_000.0


@dataclass(kw_only=True)
class WorldStep:
    step: int
    version: int
    offered: list[GroupId] = field(default_factory=list)
    holder: dict[GroupId, int | None] = field(default_factory=dict)
    done: set[GroupId] = field(default_factory=set)
    incarnation_by_member: dict[int, int] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    close: c.CloseStep | None = None


@dataclass(kw_only=True)
class WorldEngine:
    engine: EngineId
    cell: int | None
    slots: int
    incarnation: int = 0
    is_alive: bool = False
    version: int = 0
    line_free_s: float = 0.0
    is_door_open: bool = False
    is_training: bool = False


class World:
    """`run` drives the scheduler to its EndRun and returns that command."""

    def __init__(self, config: SchedulerConfig, weather: Weather) -> None:
        self.config, self.weather = config, weather
        self.scheduler = Scheduler(config)
        self.rng = random.Random(weather.seed)
        self.now_s = 0.0
        self.engines = {
            spec.engine: WorldEngine(engine=spec.engine, cell=spec.cell, slots=spec.slots)
            for spec in config.engines
        }
        self.journal: list[tuple[float, f.Fact | c.Plan]] = []
        self.end: c.EndRun | None = None
        self.version_by_group: dict[GroupId, int] = {}
        self.members_by_group: dict[GroupId, tuple[ExecutionId, ...]] = {}
        self.group_by_member: dict[ExecutionId, GroupId] = {}
        self.verdicts: dict[ExecutionId, f.VerdictGiven] = {}
        self.launched: set[ExecutionId] = set()
        self.closed: dict[ExecutionId, f.Outcome] = {}
        self.place: dict[ExecutionId, EngineId] = {}
        self.evals: set[ExecutionId] = set()
        self.num_dispatched = 0
        self.step: WorldStep | None = None
        self.consumed: dict[int, tuple[GroupId, ...]] = {}
        self.durable_step = 0
        self.published_version = self.durable_version = config.initial_version
        self.had_loss = False
        self.died_in_burst: set[int] = set()
        self.counts: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._inbox: deque[f.Fact] = deque()
        self._launches: dict[int, ExecutionId] = {}
        self._last_w = 0
        self._is_boundary = True

    # ---- time

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._sequence, action))

    def run(self) -> c.EndRun:
        for engine in self.engines.values():
            self.at(self._delay_s(1.0), lambda one=engine: self._start(one))
        for _ in range(self.weather.deaths):
            self.at(self.rng.uniform(1.0, 400.0), self._kill_one)
        self._decide()
        while self.end is None:
            self._advance()
        return self.end

    def _advance(self) -> None:
        wakeup_s = self.scheduler.next_wakeup_s()
        if self._inbox:
            while self._inbox:
                self._observe(self._inbox.popleft())
        elif wakeup_s is not None and (not self._heap or wakeup_s <= self._heap[0][0]):
            assert wakeup_s > self.now_s
            self.now_s = wakeup_s
        else:
            assert self._heap, f"nothing will ever happen: {self.scheduler.snapshot()}"
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        assert self.now_s < self.weather.horizon_s, f"no end: {self.scheduler.snapshot()}"
        self._decide()

    def tell(self, fact: f.Fact) -> None:
        """Facts reach the scheduler in order, after the command or event that made them."""
        self._inbox.append(fact)
        if self.rng.random() < self.weather.doubled_rate:
            self._inbox.append(fact)

    def _observe(self, fact: f.Fact) -> None:
        if isinstance(fact, f.ExecutionClosed) and fact.execution not in self.closed:
            self.closed[fact.execution] = fact.outcome
            self.place.pop(fact.execution, None)
        if isinstance(fact, f.CommandFailed) and fact.command_id in self._launches:
            execution = self._launches[fact.command_id]
            self.closed.setdefault(execution, f.Outcome.FAILED)
            self.place.pop(execution, None)
        self.journal.append((self.now_s, fact))
        self.scheduler.observe(fact, self.now_s)
        self._check()

    def _decide(self) -> None:
        plan = self.scheduler.decide(self.now_s)
        self.journal.append((self.now_s, plan))
        for command in plan.commands:
            assert command.reason
            name = type(command).__name__
            self.counts[name] = self.counts.get(name, 0) + 1
            self._apply(command)
        self._check()
        again = self.scheduler.decide(self.now_s)
        assert again.commands == (), f"decide is not idempotent: {again.commands}"
        self.journal.append((self.now_s, again))

    def _delay_s(self, mean_s: float) -> float:
        return self.rng.expovariate(1.0 / mean_s) if mean_s > 0 else 0.0

    # ---- engines

    def _start(self, engine: WorldEngine) -> None:
        if engine.is_alive:
            return
        engine.incarnation += 1
        engine.is_alive, engine.is_door_open, engine.is_training = True, False, False
        engine.version = self.durable_version if engine.cell == 0 else self.published_version
        engine.line_free_s = self.now_s
        self.tell(
            f.EngineReady(
                engine=engine.engine, incarnation=engine.incarnation, version=engine.version
            )
        )

    def _kill_one(self) -> None:
        alive = [engine for engine in self.engines.values() if engine.is_alive]
        if alive:
            self.kill(self.rng.choice(alive).engine)

    def kill(self, name: EngineId) -> None:
        engine = self.engines[name]
        if not engine.is_alive:
            return
        self.had_loss = True
        engine.is_alive = False
        if engine.cell == 0:
            self.step = None
            for step in [one for one in self.consumed if one > self.durable_step]:
                del self.consumed[step]
        if engine.cell is not None:
            self.died_in_burst.add(engine.cell)
        self.tell(f.EngineLost(engine=name, incarnation=engine.incarnation, reason="it was killed"))
        is_gone = engine.cell != 0 and self.rng.random() < self.weather.never_restarts_rate
        if not is_gone:
            self.at(self._delay_s(self.weather.restart_s), lambda: self._start(engine))

    # ---- commands

    def _apply(self, command: c.AnyCommand) -> None:
        match command:
            case c.EndRun():
                self.end = command
            case c.DispatchGroups() | c.DispatchEval():
                self._note_boundary()
                self._dispatch(command)
            case c.Launch():
                self._launch(command)
            case c.Cancel():
                self._cancel(command)
            case c.Fence():
                self.kill(command.engine)
                self._answer(command)
            case c.Offer():
                self._offer(command)
            case c.CloseStep():
                self._close_step(command)
            case _:
                if isinstance(command, c.CloseDoor):
                    assert self._capacity() >= self.num_dispatched - len(self.closed)
                self._answer_later(command)

    def _dispatch(self, command: c.DispatchGroups | c.DispatchEval) -> None:
        self._answer(command)
        if isinstance(command, c.DispatchEval):
            self.num_dispatched += len(command.executions)
            self.evals.update(command.executions)
            return
        self.num_dispatched += sum(len(members) for _, members in command.groups)
        self.members_by_group.update(command.groups)
        self.group_by_member.update(
            (member, group) for group, members in command.groups for member in members
        )
        self.version_by_group.update({group: command.version for group, _ in command.groups})

    def _offer(self, command: c.Offer) -> None:
        if self.step is not None and self.step.step == command.step:
            self.step.offered = [one for one in command.groups if one not in self.step.holder]
            self._claims()
        self._answer(command)

    def _close_step(self, command: c.CloseStep) -> None:
        self._answer_later(command)
        assert self.step is not None
        assert command.num_groups == len(self.step.holder)
        self.step.close = command
        self._claims()

    def _note_boundary(self) -> None:
        """Losses are over once every engine serves or returns; dead cells leave the order."""
        self._is_boundary = True
        lost = (EngineState.ABSENT, EngineState.QUARANTINED)
        view = self.scheduler.snapshot()
        self.had_loss = any(one.state in lost for one in view.engines)
        self.died_in_burst = {
            one.cell
            for one in view.engines
            if one.cell is not None and one.state is EngineState.ABSENT
        }

    def _launch(self, command: c.Launch) -> None:
        execution = command.execution
        assert execution not in self.launched
        engine = self.engines[command.engine]
        assert engine.version == self._due(engine.engine)
        self.launched.add(execution)
        self.place[execution] = command.engine
        if self.rng.random() < self.weather.fail_rate:
            self.at(self._delay_s(0.1), lambda: self._launch_fails(command))
            return
        self._answer(command)
        lasts_s = self.rng.lognormvariate(0, 0.8) * self.weather.execution_s
        rate = self.weather.straggler_rate
        if rate > 0 and self.rng.random() < rate:
            lasts_s *= 30
        self.at(lasts_s, lambda: self._close(execution, f.Outcome.COMPLETED))

    def _launch_fails(self, command: c.Launch) -> None:
        if command.execution in self.closed:
            return
        self._launches[command.command_id] = command.execution
        self.tell(f.CommandFailed(command_id=command.command_id, reason="no sandbox"))

    def _cancel(self, command: c.Cancel) -> None:
        execution = command.execution
        self._answer(command)
        if command.was_queued:
            assert execution not in self.launched
            self.launched.add(execution)
            self.closed[execution] = f.Outcome.CANCELLED
            return
        self.at(self._delay_s(0.5), lambda: self._close(execution, f.Outcome.CANCELLED))

    def _close(self, execution: ExecutionId, outcome: f.Outcome) -> None:
        if execution in self.closed:
            return
        self.tell(f.ExecutionClosed(execution=execution, outcome=outcome))
        is_void = int(execution[1:]) // self.config.group_size % 7 == 3
        rate = self.weather.no_verdict_rate
        if is_void and self.weather.void_rate > 0:
            rate = self.weather.void_rate
        has_verdict = outcome is f.Outcome.COMPLETED and self.rng.random() >= rate
        verdict = f.VerdictGiven(
            execution=execution,
            reward=1.0 if has_verdict else None,
            reason="",
            num_trainable_tokens=5 if has_verdict else 0,
            **self._value_of(execution),
        )
        self.verdicts[execution] = verdict
        self.at(self._delay_s(0.3), lambda: self.tell(verdict))

    def _value_of(self, execution: ExecutionId) -> dict[str, float | str | None]:
        """Drawn apart, so that a world without these rates is what it was."""
        group, rates = self.group_by_member.get(execution), self.weather
        is_flat = random.Random(f"{rates.seed} {group}").random() < rates.flat_rate
        is_out = random.Random(f"{rates.seed} {execution}").random() < rates.excluded_rate
        shaped = None if is_flat else float(execution[1:])
        return {"shaped": shaped, "exclusion": "truncated" if is_out else ""}

    def is_flat(self, group: GroupId) -> bool:
        """From the verdicts alone: enough of them count, and what they say does not differ."""
        if not self.config.filter_zero_variance:
            return False
        told = [self.verdicts.get(member) for member in self.members_by_group[group]]
        counting = [one for one in told if one and one.reward is not None and not one.exclusion]
        values = {one.reward if one.shaped is None else one.shaped for one in counting}
        return len(values) == 1 and len(counting) >= self.config.min_valid_members

    def _answer(self, command: c.AnyCommand) -> None:
        self.tell(f.CommandApplied(command_id=command.command_id))

    def _answer_later(self, command: c.AnyCommand) -> None:
        """In order per engine; an engine that died meanwhile answers nothing."""
        engine = self._engine_of(command)
        delay_s = self._delay_s(self.weather.answer_s)
        if isinstance(command, c.Publish) and self.rng.random() < self.weather.slow_publish_rate:
            delay_s += self.config.publish_timeout_s * self.rng.uniform(1.0, 3.0)
        if engine is None:
            self.at(delay_s, lambda: self._done(command, None, 0))
            return
        engine.line_free_s = max(engine.line_free_s, self.now_s) + delay_s
        incarnation = engine.incarnation
        self.at(engine.line_free_s - self.now_s, lambda: self._done(command, engine, incarnation))

    def _engine_of(self, command: c.AnyCommand) -> WorldEngine | None:
        match command:
            case c.CloseDoor() | c.Freeze() | c.OpenDoor() | c.Publish():
                return self.engines[command.engine]
            case c.EnterTraining() | c.LeaveTraining() | c.Admit():
                return self._cell(command.cell)
            case c.OpenStep() | c.CloseStep() | c.Checkpoint() | c.Expose():
                return self._cell(0)
            case _:
                return None

    def _cell(self, cell: int) -> WorldEngine:
        return next(one for one in self.engines.values() if one.cell == cell)

    def _done(self, command: c.AnyCommand, engine: WorldEngine | None, incarnation: int) -> None:
        if engine is not None and (not engine.is_alive or engine.incarnation != incarnation):
            return
        is_fragile = not isinstance(command, c.Checkpoint | c.AbandonStep)
        if is_fragile and self.rng.random() < self.weather.fail_rate:
            kind = f.CommandUnknown if self.rng.random() < 0.5 else f.CommandFailed
            if kind is f.CommandUnknown and self.rng.random() < 0.5:
                self._effect(command)
            self.tell(kind(command_id=command.command_id, reason="the weather"))
            return
        if isinstance(command, c.CloseStep):
            return
        self._effect(command)
        self.tell(f.CommandApplied(command_id=command.command_id))

    def _effect(self, command: c.AnyCommand) -> None:
        match command:
            case c.CloseDoor() | c.OpenDoor() | c.Publish() | c.Freeze():
                self._engine_effect(command, self.engines[command.engine])
            case c.Reroute():
                moves = dict(command.moves)
                self.place.update({e: to for e, to in moves.items() if e not in self.closed})
            case c.EnterTraining():
                self._cell(command.cell).is_training = True
            case c.LeaveTraining():
                engine = self._cell(command.cell)
                engine.is_training, engine.version = False, command.version
            case c.Checkpoint():
                self.durable_version, self.durable_step = command.version, command.step
            case c.Expose():
                assert command.version <= self.durable_version
                self.published_version = command.version
            case _:
                self._step_effect(command)

    def _engine_effect(
        self, command: c.CloseDoor | c.OpenDoor | c.Publish | c.Freeze, engine: WorldEngine
    ) -> None:
        assert not engine.is_training
        match command:
            case c.CloseDoor():
                engine.is_door_open = False
            case c.OpenDoor():
                engine.is_door_open = True
            case c.Publish():
                engine.version, engine.is_door_open = command.version, True
            case c.Freeze():
                assert not engine.is_door_open
                assert engine.engine not in self.place.values()

    def _step_effect(self, command: c.AnyCommand) -> None:
        match command:
            case c.OpenStep():
                assert self.step is None
                self.step = WorldStep(step=command.step, version=command.version)
                self._join(self.step, 0)
            case c.AbandonStep():
                if self.step is not None and self.step.step == command.step:
                    self.step = None
            case c.DropMember():
                if self.step is not None and self.step.step == command.step:
                    self._drop(command.cell)
            case c.Admit():
                step = self.step
                if step is not None and step.step == command.step and step.close is None:
                    self._join(step, command.cell)
                    self.tell(f.MemberAdmitted(step=command.step, cell=command.cell))
                    self._claims()
            case _:
                assert isinstance(command, c.CloseStep)

    # ---- the stream

    def _join(self, step: WorldStep, cell: int) -> None:
        step.incarnation_by_member[cell] = self._cell(cell).incarnation

    def _works(self, step: WorldStep, cell: int) -> bool:
        engine = self._cell(cell)
        return engine.is_alive and step.incarnation_by_member.get(cell) == engine.incarnation

    def _claims(self) -> None:
        step = self.step
        if step is None:
            return
        for cell in sorted(step.incarnation_by_member):
            if cell in step.busy or not self._works(step, cell):
                continue
            lost = [group for group, holder in step.holder.items() if holder is None]
            fresh = step.offered if len(step.holder) < self.config.groups_per_step else []
            if not lost and not fresh:
                break
            group = lost[0] if lost else step.offered.pop(0)
            step.holder[group] = cell
            step.busy.add(cell)
            if not lost:
                self.tell(f.GroupAssigned(group=group, step=step.step))
            works_s = self._delay_s(self.weather.group_work_s)
            self.at(works_s, lambda one=step, name=group, by=cell: self._worked(one, name, by))
        closing = step.close
        if closing is not None and not step.busy and len(step.done) == len(step.holder):
            self._commit(step)

    def _worked(self, step: WorldStep, group: GroupId, cell: int) -> None:
        if self.step is not step or not self._works(step, cell):
            return
        step.done.add(group)
        step.busy.discard(cell)
        self._claims()

    def _drop(self, cell: int) -> None:
        step = self.step
        if step is None or cell not in step.incarnation_by_member:
            return
        del step.incarnation_by_member[cell]
        step.busy.discard(cell)
        for group, holder in list(step.holder.items()):
            if holder != cell:
                continue
            step.done.discard(group)
            if step.close is not None:
                step.holder[group] = None
                continue
            del step.holder[group]
            self.tell(f.GroupReturned(group=group, step=step.step))
        self._claims()

    def _commit(self, step: WorldStep) -> None:
        if self.step is not step:
            return
        self.step = None
        groups = tuple(step.holder)
        for group in groups:
            age = step.version - self.version_by_group[group]
            assert 0 <= age <= self.config.staleness_bound, (group, age)
            assert not self.is_flat(group), f"{group} is trained without variance"
        self.consumed[step.step] = groups
        is_update = bool(groups) and self.rng.random() >= self.weather.untrainable_rate
        self.tell(f.StepCommitted(step=step.step, version=step.version + is_update))

    # ---- promises, from the world's own books

    def _due(self, name: EngineId) -> int | None:
        view = {one.engine: one for one in self.scheduler.snapshot().engines}
        return view[name].due_version

    def _check(self) -> None:
        view = self.scheduler.snapshot()
        w = self.num_dispatched - len(self.closed)
        assert view.waterlevel == w
        assert (view.dispatched, view.finished) == (self.num_dispatched, len(self.closed))
        assert view.launched == len(self.launched)
        assert 0 <= view.finished <= view.launched <= view.dispatched
        assert w <= self._last_w or self._is_boundary, "w rose between two boundaries"
        self._last_w, self._is_boundary = w, False
        self._check_engines(view)
        self._check_prefix(view)
        self._check_groups(view)

    def _check_engines(self, view: SchedulerView) -> None:
        num_sitting = 0
        for one in view.engines:
            assert 0 <= one.num_used <= one.slots
            num_sitting += one.num_used
            if one.state is EngineState.OPEN and self.engines[one.engine].is_alive:
                assert one.verified_version == one.due_version
                assert self.engines[one.engine].version == one.verified_version
        assert num_sitting + view.num_queued + view.num_displaced == view.waterlevel

    def _check_prefix(self, view: SchedulerView) -> None:
        roles = view.role_by_cell
        self.had_loss |= any(one.state is EngineState.QUARANTINED for one in view.engines)
        if view.phase is not Phase.RUNNING or any(view.is_returning_by_cell):
            return
        if self.config.policy is PolicyName.ASYNC:
            self._check_split(roles)
            return
        away = [
            role in (CellRole.LEAVING, CellRole.TRAINING)
            for cell, role in enumerate(roles)
            if cell not in self.died_in_burst
        ]
        is_whole = self.config.policy is PolicyName.COLOCATE and self.weather.fail_rate > 0
        if not is_whole:
            assert away == sorted(away, reverse=True), "the training set is a prefix"
        if not self.had_loss:
            assert view.capacity == self._capacity()
            assert not any(away) or view.capacity >= view.waterlevel

    def _check_split(self, roles: tuple[CellRole, ...]) -> None:
        """A cell that always trains serves nobody; the others never leave rollout."""
        num = self.config.num_training_cells
        assert all(role in (CellRole.ROLLOUT, CellRole.ABSENT) for role in roles[num:])
        serving = {self.engines[engine].cell for engine in self.place.values()}
        assert not serving & set(range(num))

    def _capacity(self) -> int:
        """Slots of living engines in role rollout, from the roles the scheduler shows."""
        roles = self.scheduler.snapshot().role_by_cell
        return sum(
            one.slots
            for one in self.engines.values()
            if one.is_alive and (one.cell is None or self._serves(one.cell, roles))
        )

    def _serves(self, cell: int, roles: tuple[CellRole, ...]) -> bool:
        return roles[cell] is CellRole.ROLLOUT and cell >= self.config.num_training_cells

    def _check_groups(self, view: SchedulerView) -> None:
        consumed = [group for groups in self.consumed.values() for group in groups]
        assert len(consumed) == len(set(consumed)), "a group was consumed twice"
        num = view.num_live + view.num_ready + view.num_assigned
        num += view.num_void + view.num_filtered + view.num_consumed + view.num_dropped
        assert num == len(self.members_by_group)
