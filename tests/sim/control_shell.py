"""A shell played move by move: it keeps what is on its way and answers when it is told to.

Owns: processes, lines of unanswered commands, running executions, the stream of the open step; it
tells facts, lets the scheduler decide after each, and has every promise checked. Must not know:
the scheduler's inside, which move comes next.
Invariants: answers of one engine keep their order; a true fact is never refused, an untrue one
always, and changes nothing but its count.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.bursts import Phase
from opengyre.control.config import SchedulerConfig
from opengyre.control.ids import CommandId, EngineId, ExecutionId, GroupId
from opengyre.control.scheduler import Scheduler
from opengyre.control.view import SchedulerView
from tests.sim.control_command_promises import PlanSeen, check_command, check_fact
from tests.sim.control_events import add, pass_boundary, pass_time
from tests.sim.control_model import CORE, new_truth
from tests.sim.control_promises import check_counts, check_view, drop_overdue

FATAL = (c.DispatchGroups, c.DispatchEval, c.Checkpoint, c.Offer)
Answer = f.CommandApplied | f.CommandFailed | f.CommandUnknown
NEVER_FAILS = (c.EndRun, c.AbandonStep, c.Fence, c.Cancel)


@dataclass(slots=True, kw_only=True)
class Process:
    """`told_lost` is the last incarnation whose death was told."""

    engine: EngineId
    cell: int | None
    incarnation: int = 0
    is_alive: bool = False
    told_lost: int = 0


@dataclass(slots=True, kw_only=True)
class Stream:
    """The open step as the shell has it; `holder` names the cell whose work a group is."""

    step: int
    version: int
    members: list[int] = field(default_factory=lambda: [0])
    dropped: set[int] = field(default_factory=set)
    offered: list[GroupId] = field(default_factory=list)
    holder: dict[GroupId, int] = field(default_factory=dict)
    is_closed: bool = False


class Shell:
    """Every move ends with the scheduler's plan taken in and all promises checked."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.truth = new_truth(config)
        self.now_s = 0.0
        self.processes = {
            spec.engine: Process(engine=spec.engine, cell=spec.cell) for spec in config.engines
        }
        self.lines: dict[str, list[c.AnyCommand]] = {}
        self.over: list[CommandId] = []
        self.outlived: set[CommandId] = set()
        self.running: list[ExecutionId] = []
        self.ungraded: list[ExecutionId] = []
        self.finished: list[ExecutionId] = []
        self.stream: Stream | None = None
        self.held: str | None = None
        self.is_update: dict[int, bool] = {}
        self.done: Counter[str] = Counter()
        self.num_refused = 0
        self.last_view = self.view
        self.decide()

    @property
    def view(self) -> SchedulerView:
        return self.scheduler.snapshot()

    @property
    def has_ended(self) -> bool:
        return self.truth.end is not None

    # ---- the loop

    def tell(self, fact: f.Fact) -> None:
        """A true fact: it is believed, and the scheduler decides."""
        refused = self.last_view.refused
        check_fact(self.truth, fact)
        self.scheduler.observe(fact, self.now_s)
        add(self.truth, self.now_s, fact)
        view = self.view
        assert view.refused == refused, f"a true fact was refused: {fact}, {view.refused}"
        check_counts(self.truth, view)
        self.decide()

    def tell_untrue(self, fact: f.Fact) -> None:
        """A late, doubled or fenced fact: refused, counted, and nothing else."""
        before = self.view
        assert self.view == before, "a look changed something"
        self.scheduler.observe(fact, self.now_s)
        after = self.last_view = self.view
        num = [sum(num for _, num in view.refused) for view in (before, after)]
        assert num[1] == num[0] + 1, f"not refused: {fact}"
        assert replace(after, refused=()) == replace(before, refused=()), f"it changed: {fact}"
        assert self.scheduler.decide(self.now_s).commands == ()
        self.num_refused += 1

    def tell_either(self, fact: Answer) -> None:
        """An answer that lost a race with another fact: refused or not, it says nothing new."""
        self.truth.unanswered.pop(fact.command_id, None)
        before = self.last_view
        self.scheduler.observe(fact, self.now_s)
        self.last_view = self.view
        assert replace(self.last_view, refused=()) == replace(before, refused=())
        assert self.scheduler.decide(self.now_s).commands == ()

    def decide(self) -> None:
        before = self.last_view
        roles = {cell: one.role for cell, one in enumerate(self.truth.cells)}
        plan = self.scheduler.decide(self.now_s)
        again = self.scheduler.decide(self.now_s)
        assert again.commands == (), f"not idempotent: {plan.commands} then {again.commands}"
        seen = PlanSeen(before=before, after=self.view, roles_before=roles)
        self.last_view = seen.after
        last_id = max(self.truth.commands, default=0)
        if seen.is_over and self.truth.over_since_s is None:
            self.truth.over_since_s = self.now_s
        pass_time(self.truth, self.now_s)
        if seen.is_boundary:
            pass_boundary(self.truth, seen.after.steps_done)
        drop_overdue(self.truth, seen)
        for command in plan.commands:
            assert command.command_id > last_id
            last_id = command.command_id
            check_command(self.truth, command, seen)
            add(self.truth, self.now_s, command)
            seen.given.append(command)
        wakeup_s = self.scheduler.next_wakeup_s()
        assert wakeup_s is None or wakeup_s > self.now_s
        check_view(self.truth, seen, last_command_id=last_id)
        for command in plan.commands:
            self._take(command)

    def wait(self, after_s: float | None) -> None:
        """Time passes; None: until the scheduler wants to look again."""
        wakeup_s = self.scheduler.next_wakeup_s()
        if after_s is None:
            if wakeup_s is None:
                return
            self.now_s = wakeup_s
        else:
            self.now_s += after_s
        self.decide()

    # ---- commands come in

    def _take(self, command: c.AnyCommand) -> None:
        self.done[type(command).__name__] += 1
        self.done["recall"] += "recalled" in command.reason
        if isinstance(command, c.OpenStep):
            again = {*self.truth.undone, *self.truth.interrupted}
            self.done["redo"] += command.step in again
        if isinstance(command, c.CloseStep):
            assert self.stream is not None
            assert len(self.stream.holder) == command.num_groups
            self.stream.is_closed = True
        if isinstance(command, c.AbandonStep):
            self._outlive()
            self.lines.pop("offers", None)
            self.done["abandoned in closing"] += self.stream is not None and self.stream.is_closed
            self.stream = None
        if isinstance(command, c.DropMember) and not self._is_stale(command):
            assert self.stream is not None
            self.stream.dropped.add(command.cell)
        if isinstance(command, c.Fence):
            self._die(self.processes[command.engine])
        self.lines.setdefault(_line(command), []).append(command)

    def heads(self) -> list[c.AnyCommand]:
        """Each command that may be answered next, oldest first; a held engine is slow."""
        lines = self.lines.items()
        heads = [line[0] for name, line in lines if line and name != self.held]
        return sorted(heads, key=lambda one: one.command_id)

    def _incarnation(self, command: c.AnyCommand) -> tuple[int, bool] | None:
        process = self.processes.get(EngineId(_line(command)))
        return None if process is None else (process.incarnation, process.is_alive)

    def _remove(self, command: c.AnyCommand) -> None:
        self.lines[_line(command)].remove(command)
        self.over.append(command.command_id)

    # ---- answers

    def apply(self, command: c.AnyCommand, *, is_trainable: bool = True) -> None:
        self._remove(command)
        if isinstance(command, c.CloseStep):
            self._commit(command, is_trainable=is_trainable)
            return
        if self._is_stale(command):
            self.tell_either(f.CommandApplied(command_id=command.command_id))
            return
        if isinstance(command, c.Admit) and not self._can_join(command):
            late = f.CommandFailed(command_id=command.command_id, reason="too late to join")
            self.tell(late)
            return
        incarnation = self._incarnation(command)
        self._effect(command)
        if self._incarnation(command) == incarnation:
            self.tell(f.CommandApplied(command_id=command.command_id))

    def fail(self, command: c.AnyCommand, *, is_unknown: bool, has_effect: bool = False) -> None:
        self._remove(command)
        kind = f.CommandUnknown if is_unknown else f.CommandFailed
        fact = kind(command_id=command.command_id, reason="so it went")
        if self._is_stale(command) and not isinstance(command, c.DropMember):
            self.tell_either(fact)
            return
        if isinstance(command, c.CloseStep):
            has_effect = False
        if isinstance(command, c.Launch) and is_unknown:
            self.running.append(command.execution)
        elif is_unknown and has_effect and not isinstance(command, c.Admit):
            self._effect(command)
        self.done[f"failed {type(command).__name__}"] += 1
        self.tell(fact)

    def _is_stale(self, command: c.AnyCommand) -> bool:
        """It names a step that is gone by now, or a cell that was dropped from it."""
        if not isinstance(command, c.Offer | c.Admit | c.DropMember):
            return False
        if command.command_id in self.outlived:
            return True
        if isinstance(command, c.Admit) and self.stream is not None:
            return self.stream.step != command.step or command.cell in self.stream.dropped
        return self.stream is None or self.stream.step != command.step

    def _outlive(self) -> None:
        """The step may open again under its number; what was asked of this life is stale."""
        for line in self.lines.values():
            some = [one for one in line if isinstance(one, c.Offer | c.Admit | c.DropMember)]
            self.outlived.update(one.command_id for one in some)

    def _commit(self, command: c.CloseStep, *, is_trainable: bool) -> None:
        stream = self.stream
        assert stream is not None, "the step was abandoned while its update was on its way"
        self.stream = None
        is_update = self.is_update.setdefault(stream.step, is_trainable and bool(stream.holder))
        self.done["commit"] += 1
        self.tell(f.StepCommitted(step=stream.step, version=stream.version + is_update))
        self.tell_either(f.CommandApplied(command_id=command.command_id))

    def _effect(self, command: c.AnyCommand) -> None:
        match command:
            case c.Launch():
                self.running.append(command.execution)
            case c.Cancel() if command.was_queued:
                self.finished.append(command.execution)
            case c.Fence():
                self._tell_lost(self.processes[command.engine])
            case c.OpenStep():
                self.stream = Stream(step=command.step, version=command.version)
            case c.Offer() if self.stream is not None and self.stream.step == command.step:
                held = self.stream.holder
                self.stream.offered = [one for one in command.groups if one not in held]
            case c.Admit() if self.stream is not None:
                self.stream.members.append(command.cell)
                self.tell(f.MemberAdmitted(step=command.step, cell=command.cell))
            case c.DropMember():
                self._drop(command)
            case _:
                return

    def _can_join(self, command: c.Admit) -> bool:
        stream = self.stream
        if stream is None or stream.step != command.step or stream.is_closed:
            return False
        return command.cell not in stream.dropped

    def _drop(self, command: c.DropMember) -> None:
        stream = self.stream
        if stream is None or stream.step != command.step:
            return
        stream.members = [one for one in stream.members if one != command.cell]
        for group in [one for one, holder in stream.holder.items() if holder == command.cell]:
            if self.stream is not stream or stream.is_closed:
                stream.holder[group] = 0
                continue
            del stream.holder[group]
            stream.offered.append(group)
            self.done["returned"] += 1
            self.tell(f.GroupReturned(group=group, step=stream.step))

    # ---- executions and the stream

    def close(self, execution: ExecutionId, outcome: f.Outcome) -> None:
        self.running.remove(execution)
        self.finished.append(execution)
        if self.truth.executions[execution].is_valid is None:
            self.ungraded.append(execution)
        self.tell(f.ExecutionClosed(execution=execution, outcome=outcome))

    def grade(
        self,
        execution: ExecutionId,
        *,
        has_verdict: bool,
        shaped: float | None = None,
        exclusion: str = "",
    ) -> None:
        """Also before the close: the grader may be quicker than the exit notice."""
        if execution in self.ungraded:
            self.ungraded.remove(execution)
        reward = 1.0 if has_verdict else None
        fact = f.VerdictGiven(
            execution=execution,
            reward=reward,
            reason="",
            num_trainable_tokens=int(has_verdict),
            shaped=shaped,
            exclusion=exclusion,
        )
        filtered = self.last_view.num_filtered
        self.tell(fact)
        self.done["filtered"] += self.last_view.num_filtered - filtered

    def can_claim(self) -> bool:
        stream = self.stream
        return stream is not None and not stream.is_closed and bool(stream.offered)

    def claim(self, *, which: int = 0, member: int = 0) -> None:
        stream = self.stream
        assert stream is not None
        group = stream.offered.pop(which % len(stream.offered))
        living = [one for one in stream.members if self.cell(one).is_alive]
        stream.holder[group] = living[member % len(living)]
        assert len(stream.holder) <= self.config.groups_per_step
        self.tell(f.GroupAssigned(group=group, step=stream.step))

    # ---- processes

    def cell(self, cell: int) -> Process:
        return next(one for one in self.processes.values() if one.cell == cell)

    def start(self, process: Process, *, is_behind: bool = False) -> None:
        """The core restores the last checkpoint; the others load what was published last."""
        if process.is_alive:
            self._die(process)
        process.incarnation += 1
        process.is_alive = True
        exposed = self.truth.exposed
        version = exposed[-1] if exposed else self.config.initial_version
        if process.cell == 0:
            version = self.truth.durable_version
        elif is_behind and len(exposed) > 1:
            version = exposed[-2]
        self.done["start"] += 1
        self.tell(
            f.EngineReady(engine=process.engine, incarnation=process.incarnation, version=version)
        )

    def lose(self, process: Process, *, is_heard_late: bool = False) -> None:
        """What was on its way from it may come after its death."""
        self.done["death"] += 1
        gone = self._die(process)
        self._tell_lost(process)
        for command in gone if is_heard_late else ():
            self.tell_untrue(f.CommandApplied(command_id=command.command_id))

    def _tell_lost(self, process: Process) -> None:
        """Once for each life: a second notice would be refused."""
        if not process.is_alive and process.told_lost < process.incarnation:
            process.told_lost = process.incarnation
            fact = f.EngineLost(
                engine=process.engine, incarnation=process.incarnation, reason="it was killed"
            )
            self.tell(fact)

    def _die(self, process: Process) -> list[c.AnyCommand]:
        """Nothing of it is answered any more; the step of a dead core is gone."""
        process.is_alive = False
        if self.stream is not None and process.cell in self.stream.members:
            self.stream.members.remove(process.cell)
        gone = self.lines.pop(process.engine, [])
        self.over.extend(one.command_id for one in gone)
        if process.engine == CORE:
            self._outlive()
            self.stream = None
        return gone

    def value(self, execution: ExecutionId) -> float:
        """Another one for each member of a small group; every third group has one for all."""
        group = self.truth.executions[execution].group
        is_flat = group is not None and int(group[1:]) % 3 == 1
        return 0.5 if is_flat else 0.25 * (int(execution[1:]) % 4)

    # ---- calm progress

    def calm_moves(self) -> list[str]:
        """What goes on by itself when nothing is wrong."""
        moves = ["answer"] if self.heads() else []
        moves += ["claim"] if self.can_claim() else []
        moves += ["grade"] if self.ungraded else []
        moves += ["close"] if self.running else []
        moves += ["start"] if self.dead() else []
        return moves

    def victims(self, who: str) -> list[Process]:
        """The core, the satellites with work of the open step, or all that hold executions."""
        alive = [one for one in self.processes.values() if one.is_alive]
        workers = set() if self.stream is None else set(self.stream.holder.values())
        match who:
            case "core":
                return [one for one in alive if one.cell == 0]
            case "member":
                return [one for one in alive if one.cell != 0 and one.cell in workers]
            case _:
                places = {life.place for life in self.truth.executions.values()}
                return [one for one in alive if one.engine in places]

    def dead(self) -> list[Process]:
        return [one for one in self.processes.values() if not one.is_alive]

    def move(self, name: str, *, number: int, is_valid: bool = True) -> None:
        match name:
            case "answer":
                heads = self.heads()
                self.apply(heads[number % len(heads)])
            case "claim":
                self.claim(member=number)
            case "grade":
                one = self.ungraded[number % len(self.ungraded)]
                exclusion = "truncated" if int(one[1:]) % 11 == 5 else ""
                self.grade(one, has_verdict=is_valid, shaped=self.value(one), exclusion=exclusion)
            case "close":
                self.close(self.running[number % len(self.running)], f.Outcome.COMPLETED)
            case "start":
                self.start(self.dead()[number % len(self.dead())])
            case _:
                self.wait(None)

    def finish(self, max_moves: int) -> c.EndRun:
        """No more faults: the run comes to its end."""
        self.held = None
        for _ in range(max_moves):
            if self.truth.end is not None:
                return self.truth.end
            moves = self.calm_moves()
            assert moves or self.scheduler.next_wakeup_s() is not None, f"stuck: {self.view}"
            self.move(moves[0] if moves else "wait", number=0)
        raise AssertionError(f"no end in {max_moves} moves: {self.view}")

    @property
    def is_ending(self) -> bool:
        return self.view.phase in (Phase.ENDING, Phase.ENDED)


def _line(command: c.AnyCommand) -> str:
    """Commands of one line are answered in order; others as they come."""
    match command:
        case c.CloseDoor() | c.Freeze() | c.OpenDoor() | c.Publish():
            return command.engine
        case c.EnterTraining() | c.LeaveTraining() | c.Admit():
            return f"c{command.cell}"
        case c.OpenStep() | c.CloseStep() | c.Checkpoint() | c.Expose():
            return CORE
        case c.Offer():
            return "offers"
        case _:
            return f"#{command.command_id}"
