"""The shell as the exhaustive check sees it: what may happen next, and what it does.

Owns: Shape (a scheduler's config and how many of each mishap), World (the truth of engines,
routes, outcomes and the stream), and the events that are possible in it. Must not know: the
scheduler's inside; it hears plans and answers with facts.
Invariants: an event is a plain tuple of words; the same event in the same state gives the same
facts; `possible` lists events in a fixed order.

Which orders are left out, and why nothing is lost by it:
- A command whose answer changes nothing in the scheduler (Launch, Cancel, DispatchGroups, Offer,
  Fence) is answered at once. With faults left, a launch is answered when it fails or closes.
- A command that makes an engine suspect when it fails has one kind of failure: failed, unknown
  and unknown-but-done all end in the fence of that engine within the same plan.
- The verdict of an execution that does not close last in its group is given as it closes. Until
  the last one of a group it changes numbers of the group which no rule reads; and which verdict
  of a group comes last makes no difference, as only their number and their bounds count. So
  every run has its equal among those explored, with the same group ready or void at the same
  moment. After the run began to end, verdicts are left out: no group is offered any more.
- Time stands still between events and passes to the scheduler's next wake-up only; with no time
  limit in between, no plan can tell the difference. All limits are small whole numbers, so that
  a limit may pass before or after any event.
- An answer that comes after its own limit (a publication, a join) is a fault and counts as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.bursts import Phase
from opengyre.control.cells import EngineState
from opengyre.control.config import SchedulerConfig
from opengyre.control.ids import CommandId, EngineId, ExecutionId, GroupId
from opengyre.control.view import SchedulerView

Event = tuple[str | int | bool, ...]

ODD = "odd"
LOOSE = (c.Reroute, c.AbandonStep, c.DropMember)
LIMITED = (c.Publish, c.Admit)
SUSPECT = (c.OpenDoor, c.Publish, c.LeaveTraining, c.OpenStep, c.CloseStep, c.Expose, c.Checkpoint)
STEADFAST = (c.AbandonStep,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`losable` engines may die, `num_losses` deaths in all; `num_nones` verdicts may be none;
    `num_odds` may say something else than all others, so that their groups are not filtered;
    `num_faults` commands may fail, be unknown or be answered too late; `num_empties` steps may
    have nothing to train on. With `is_started` the search begins at the first dispatch, with
    every door open; else at nothing, and the engines come up in every order. With
    `has_late_verdicts` each verdict comes at any moment after its execution closed."""

    name: str
    config: SchedulerConfig
    losable: tuple[EngineId, ...] = ()
    num_losses: int = 0
    num_nones: int = 0
    num_odds: int = 0
    num_faults: int = 0
    num_empties: int = 0
    is_started: bool = True
    has_late_verdicts: bool = False


@dataclass(slots=True, kw_only=True)
class Machine:
    """One engine process; `line` holds its unanswered commands in order, and the first that has
    a limit must be answered by `due_s`."""

    engine: EngineId
    cell: int | None
    incarnation: int = 0
    is_alive: bool = False
    version: int = 0
    is_training: bool = False
    is_door_open: bool = False
    due_s: float | None = None
    line: list[c.AnyCommand] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Stream:
    """The open step: `holder` of each claimed group; a member that died works no more, and
    what it holds is held until it is dropped."""

    step: int
    version: int
    is_closed: bool = False
    offered: list[GroupId] = field(default_factory=list)
    holder: dict[GroupId, int] = field(default_factory=dict)
    is_working_by_member: dict[int, bool] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class World:
    machines: dict[EngineId, Machine]
    loose: list[c.AnyCommand] = field(default_factory=list)
    stream: Stream | None = None
    route: dict[ExecutionId, EngineId] = field(default_factory=dict)
    launches: dict[ExecutionId, CommandId] = field(default_factory=dict)
    cancelling: dict[ExecutionId, None] = field(default_factory=dict)
    ungraded: dict[ExecutionId, None] = field(default_factory=dict)
    group_of: dict[ExecutionId, GroupId] = field(default_factory=dict)
    num_open_by_group: dict[GroupId, int] = field(default_factory=dict)
    version_by_group: dict[GroupId, int] = field(default_factory=dict)
    consumed: dict[GroupId, int] = field(default_factory=dict)
    num_dispatched: int = 0
    num_launched: int = 0
    num_closed: int = 0
    version: int = 0
    durable_version: int = 0
    durable_step: int = 0
    published_version: int = 0
    num_losses: int = 0
    num_nones: int = 0
    num_odds: int = 0
    num_faults: int = 0
    num_empties: int = 0
    had_loss: bool = False
    died_in_burst: dict[int, None] = field(default_factory=dict)
    end: c.EndRun | None = None
    is_ending: bool = False
    burst: int = 0

    def cell(self, number: int) -> Machine:
        return next(one for one in self.machines.values() if one.cell == number)


def new_world(shape: Shape) -> World:
    return World(
        machines={
            spec.engine: Machine(engine=spec.engine, cell=spec.cell)
            for spec in shape.config.engines
        },
        num_losses=shape.num_losses,
        num_nones=shape.num_nones,
        num_odds=shape.num_odds,
        num_faults=shape.num_faults,
        num_empties=shape.num_empties,
    )


# ---- what may happen


def possible(world: World, shape: Shape, now_s: float, wakeup_s: float | None) -> Iterator[Event]:
    if world.end is not None:
        return
    for machine in world.machines.values():
        yield from _of_machine(world, shape, machine)
    for index, command in enumerate(world.loose):
        yield ("answer loose", index)
        if world.num_faults > 0 and not isinstance(command, STEADFAST):
            yield from (("fail loose", index), ("unknown loose", index, True))
            yield ("unknown loose", index, False)
    yield from _of_executions(world, shape)
    yield from _of_stream(world)
    if wakeup_s is not None and (world.num_faults > 0 or not _is_late(world, wakeup_s)):
        yield ("time", wakeup_s - now_s)


def _of_machine(world: World, shape: Shape, machine: Machine) -> Iterator[Event]:
    name = machine.engine
    if not machine.is_alive:
        yield ("ready", name)
        return
    if world.num_losses > 0 and name in shape.losable:
        yield ("lose", name)
    if not machine.line:
        return
    command = machine.line[0]
    if not isinstance(command, c.CloseStep):
        yield ("answer", name)
    elif _is_worked(world, command):
        yield ("commit", True)
        if world.num_empties > 0:
            yield ("commit", False)
    if world.num_faults > 0:
        yield ("fail", name)
        if not isinstance(command, SUSPECT):
            yield from (("unknown", name, True), ("unknown", name, False))


def _is_worked(world: World, command: c.CloseStep) -> bool:
    stream = world.stream
    if stream is None or stream.step != command.step:
        return False
    return all(stream.is_working_by_member.get(cell, False) for cell in stream.holder.values())


def _of_executions(world: World, shape: Shape) -> Iterator[Event]:
    for execution in world.route:
        if world.is_ending or execution in world.cancelling:
            yield ("close", execution)
            continue
        if world.num_faults > 0 and execution in world.launches:
            yield ("fail launch", execution)
        is_last = world.num_open_by_group[world.group_of[execution]] == 1
        if is_last or shape.has_late_verdicts:
            yield ("close", execution)
            continue
        for says in _verdicts(world):
            yield ("close", execution, says)
    if world.is_ending:
        return
    for execution in world.ungraded:
        for says in _verdicts(world):
            yield ("verdict", execution, says)


def _verdicts(world: World) -> Iterator[bool | str]:
    yield True
    if world.num_nones > 0:
        yield False
    if world.num_odds > 0:
        yield ODD


def _of_stream(world: World) -> Iterator[Event]:
    stream = world.stream
    if stream is None or stream.is_closed or not stream.offered:
        return
    for cell, is_working in stream.is_working_by_member.items():
        if is_working:
            yield ("assign", cell)


def _is_late(world: World, at_s: float) -> bool:
    return any(one.due_s is not None and one.due_s <= at_s for one in world.machines.values())


# ---- what it does


def happen(world: World, event: Event, now_s: float) -> list[f.Fact]:
    """The facts of `event`, in order; the world changes."""
    match event:
        case ("ready", name):
            return _start(world, world.machines[EngineId(str(name))])
        case ("lose", name):
            world.num_losses -= 1
            return kill(world, EngineId(str(name)))
        case ("time", _):
            if _is_late(world, now_s):
                world.num_faults -= 1
                for machine in world.machines.values():
                    machine.due_s = None
            return []
        case ("close" | "verdict" | "fail launch", *_):
            return _of_execution(world, event)
        case ("assign", int(cell)):
            return _assign(world, cell)
        case ("commit", bool(is_update)):
            return _commit(world, is_update=is_update)
        case _:
            return _answer(world, event)


def _start(world: World, machine: Machine) -> list[f.Fact]:
    machine.incarnation += 1
    machine.is_alive = True
    machine.version = world.durable_version if machine.cell == 0 else world.published_version
    if machine.cell == 0:
        world.version = world.durable_version
    name, number = machine.engine, machine.incarnation
    return [f.EngineReady(engine=name, incarnation=number, version=machine.version)]


def kill(world: World, name: EngineId) -> list[f.Fact]:
    """Its commands are answered by nobody; with the core go the step and what is not durable."""
    machine = world.machines[name]
    if not machine.is_alive:
        return []
    world.had_loss = True
    machine.is_alive = machine.is_training = machine.is_door_open = False
    machine.version, machine.due_s = 0, None
    machine.line.clear()
    if machine.cell is not None:
        world.died_in_burst[machine.cell] = None
        if world.stream is not None and machine.cell in world.stream.is_working_by_member:
            world.stream.is_working_by_member[machine.cell] = False
    if machine.cell == 0:
        world.stream = None
        for group in [one for one, step in world.consumed.items() if step > world.durable_step]:
            del world.consumed[group]
    return [f.EngineLost(engine=name, incarnation=machine.incarnation, reason="it was killed")]


def _of_execution(world: World, event: Event) -> list[f.Fact]:
    kind, execution = str(event[0]), ExecutionId(str(event[1]))
    if kind == "verdict":
        del world.ungraded[execution]
        return [_verdict(world, execution, event[2])]
    del world.route[execution]
    world.num_open_by_group[world.group_of[execution]] -= 1
    world.num_closed += 1
    launch = world.launches.pop(execution, None)
    if kind == "fail launch":
        assert launch is not None
        world.num_faults -= 1
        return [f.CommandFailed(command_id=launch, reason="no sandbox")]
    facts: list[f.Fact] = [] if launch is None else [f.CommandApplied(command_id=launch)]
    is_cancelled = execution in world.cancelling
    world.cancelling.pop(execution, None)
    outcome = f.Outcome.CANCELLED if is_cancelled else f.Outcome.COMPLETED
    facts.append(f.ExecutionClosed(execution=execution, outcome=outcome))
    if len(event) > 2:
        facts.append(_verdict(world, execution, event[2]))
    elif is_cancelled:
        facts.append(_verdict_fact(execution, is_valid=False))
    else:
        world.ungraded[execution] = None
    return facts


def _verdict(world: World, execution: ExecutionId, says: str | int | bool) -> f.VerdictGiven:
    world.num_nones -= says is False
    world.num_odds -= says == ODD
    shaped = 0.5 if says == ODD else None
    return _verdict_fact(execution, is_valid=bool(says), shaped=shaped)


def _verdict_fact(
    execution: ExecutionId, *, is_valid: bool, shaped: float | None = None
) -> f.VerdictGiven:
    return f.VerdictGiven(
        execution=execution,
        reward=1.0 if is_valid else None,
        reason="",
        num_trainable_tokens=5 * is_valid,
        shaped=shaped,
    )


def _assign(world: World, cell: int) -> list[f.Fact]:
    stream = world.stream
    assert stream is not None
    group = stream.offered.pop(0)
    stream.holder[group] = cell
    return [f.GroupAssigned(group=group, step=stream.step)]


def _commit(world: World, *, is_update: bool) -> list[f.Fact]:
    """P7, P8: one update under the version that was exposed, each group in it once."""
    stream, core = world.stream, world.cell(0)
    assert stream is not None
    close = core.line.pop(0)
    assert isinstance(close, c.CloseStep)
    assert close.num_groups == len(stream.holder)
    assert stream.version == world.version, "the weights changed while a step was open"
    for group in stream.holder:
        assert group not in world.consumed, f"{group} was trained on twice"
        world.consumed[group] = stream.step
    world.num_empties -= not is_update
    world.version += is_update
    world.stream = None
    version = stream.version + is_update
    return [
        f.CommandApplied(command_id=close.command_id),
        f.StepCommitted(step=stream.step, version=version),
    ]


# ---- commands


def note_boundary(world: World, view: SchedulerView) -> None:
    """A boundary puts the dead out of the order, and ends the time after a loss if none is."""
    world.is_ending = view.phase in (Phase.ENDING, Phase.ENDED)
    if world.burst == view.burst:
        return
    world.burst = view.burst
    lost = (EngineState.ABSENT, EngineState.QUARANTINED)
    world.had_loss = any(one.state in lost for one in view.engines)
    world.died_in_burst = {
        one.cell: None
        for one in view.engines
        if one.cell is not None and one.state is EngineState.ABSENT
    }


def take(world: World, shape: Shape, command: c.AnyCommand, now_s: float) -> list[f.Fact]:
    """A command arrives: what is answered at once, or [] if it waits in a line."""
    if isinstance(command, LOOSE):
        world.loose.append(command)
        return []
    machine = _machine_of(world, command)
    if machine is not None:
        _stand_in_line(world, shape, machine, command, now_s)
        return []
    return _do_at_once(world, command)


def _do_at_once(world: World, command: c.AnyCommand) -> list[f.Fact]:
    applied: list[f.Fact] = [f.CommandApplied(command_id=command.command_id)]
    match command:
        case c.EndRun():
            world.end = command
            return []
        case c.DispatchGroups():
            _dispatch(world, command)
        case c.Launch():
            _launch(world, command)
            if world.num_faults > 0:
                world.launches[command.execution] = command.command_id
                return []
        case c.Cancel():
            _cancel(world, command)
        case c.Fence():
            return kill(world, command.engine) + applied
        case c.Offer():
            stream = world.stream
            if stream is not None and stream.step == command.step:
                stream.offered = [one for one in command.groups if one not in stream.holder]
        case _:
            raise AssertionError(f"nobody takes {command}")
    return applied


def _machine_of(world: World, command: c.AnyCommand) -> Machine | None:
    match command:
        case c.CloseDoor() | c.Freeze() | c.OpenDoor() | c.Publish():
            return world.machines[command.engine]
        case c.EnterTraining() | c.LeaveTraining() | c.Admit():
            return world.cell(command.cell)
        case c.OpenStep() | c.CloseStep() | c.Checkpoint() | c.Expose():
            return world.cell(0)
        case _:
            return None


def _stand_in_line(
    world: World, shape: Shape, machine: Machine, command: c.AnyCommand, now_s: float
) -> None:
    assert machine.is_alive, f"{command} to a dead process"
    machine.line.append(command)
    if isinstance(command, LIMITED):
        is_publish = isinstance(command, c.Publish)
        config = shape.config
        limit_s = config.publish_timeout_s if is_publish else config.join_deadline_s
        machine.due_s = now_s + limit_s
    if isinstance(command, c.CloseStep):
        stream = world.stream
        assert stream is not None
        assert stream.step == command.step
        assert command.num_groups == len(stream.holder)
        stream.is_closed = True


def _dispatch(world: World, command: c.DispatchGroups) -> None:
    for group, members in command.groups:
        assert group not in world.version_by_group, "a group was dispatched twice"
        world.version_by_group[group] = command.version
        world.num_open_by_group[group] = len(members)
        world.group_of.update(dict.fromkeys(members, group))
        world.num_dispatched += len(members)


def _launch(world: World, command: c.Launch) -> None:
    machine = world.machines[command.engine]
    assert machine.is_alive
    assert not machine.is_training, "a launch at a cell in training"
    assert _is_fresh(world, machine), "a launch at an old version"
    assert command.execution not in world.route, "launched twice"
    world.route[command.execution] = command.engine
    world.num_launched += 1


def _is_fresh(world: World, machine: Machine) -> bool:
    """A recalled core serves what is durable, though it is not published yet."""
    is_own = machine.cell == 0 and machine.version == world.durable_version
    return is_own or machine.version == world.published_version


def _cancel(world: World, command: c.Cancel) -> None:
    if not command.was_queued:
        assert command.execution in world.route
        world.cancelling[command.execution] = None
        return
    assert command.execution not in world.route
    world.num_open_by_group[world.group_of[command.execution]] -= 1
    world.num_launched += 1
    world.num_closed += 1


# ---- answers


def _answer(world: World, event: Event) -> list[f.Fact]:
    kind, where = str(event[0]), event[1]
    if isinstance(where, int):
        command = world.loose.pop(where)
    else:
        machine = world.machines[EngineId(str(where))]
        command = machine.line.pop(0)
        if isinstance(command, LIMITED):
            machine.due_s = None
    is_applied = kind.startswith("answer")
    is_done = is_applied or (kind.startswith("unknown") and bool(event[2]))
    facts = _effect(world, command) if is_done else []
    if is_applied:
        return [*facts, f.CommandApplied(command_id=command.command_id)]
    world.num_faults -= 1
    answer = f.CommandFailed if kind.startswith("fail") else f.CommandUnknown
    return [*facts, answer(command_id=command.command_id, reason="a fault")]


def _effect(world: World, command: c.AnyCommand) -> list[f.Fact]:
    match command:
        case c.Reroute():
            world.route.update({e: to for e, to in command.moves if e in world.route})
        case c.EnterTraining():
            world.cell(command.cell).is_training = True
        case c.LeaveTraining():
            machine = world.cell(command.cell)
            machine.is_training, machine.version = False, command.version
        case c.Checkpoint():
            assert command.version == world.version
            world.durable_version, world.durable_step = command.version, command.step
        case c.Expose():
            assert command.version == world.durable_version, "exposed before it was durable"
            world.published_version = command.version
        case c.CloseDoor() | c.OpenDoor() | c.Publish() | c.Freeze():
            _engine_effect(world, command, world.machines[command.engine])
        case _:
            return _step_effect(world, command)
    return []


def _engine_effect(
    world: World, command: c.CloseDoor | c.OpenDoor | c.Publish | c.Freeze, machine: Machine
) -> None:
    assert not machine.is_training
    match command:
        case c.CloseDoor():
            machine.is_door_open = False
        case c.OpenDoor():
            is_due = any(isinstance(one, c.Publish) for one in machine.line)
            assert is_due or _is_fresh(world, machine), "a door opened on an old version"
            machine.is_door_open = True
        case c.Publish():
            assert command.version <= world.durable_version
            machine.version, machine.is_door_open = command.version, True
        case c.Freeze():
            assert not machine.is_door_open
            assert machine.engine not in world.route.values(), "frozen before all were rerouted"


def _step_effect(world: World, command: c.AnyCommand) -> list[f.Fact]:
    stream = world.stream
    match command:
        case c.OpenStep():
            assert stream is None, "a step opened over another"
            assert command.version == world.version
            assert world.cell(0).is_training
            world.stream = Stream(step=command.step, version=command.version)
            world.stream.is_working_by_member[0] = True
        case c.AbandonStep():
            if stream is not None and stream.step == command.step:
                world.stream = None
        case c.DropMember():
            if stream is not None and stream.step == command.step:
                return _drop(stream, command.cell)
        case c.Admit():
            is_now = stream is not None and stream.step == command.step and not stream.is_closed
            if not is_now or stream is None or command.cell in stream.dropped:
                return []
            stream.is_working_by_member[command.cell] = True
            return [f.MemberAdmitted(step=command.step, cell=command.cell)]
        case _:
            raise AssertionError(f"nobody does {command}")
    return []


def _drop(stream: Stream, cell: int) -> list[f.Fact]:
    """What it had claimed comes back; of a closed step it is done again by the core."""
    stream.dropped = sorted({*stream.dropped, cell})
    stream.is_working_by_member.pop(cell, None)
    facts: list[f.Fact] = []
    for group in [one for one, holder in stream.holder.items() if holder == cell]:
        if stream.is_closed:
            stream.holder[group] = 0
            continue
        del stream.holder[group]
        facts.append(f.GroupReturned(group=group, step=stream.step))
    return facts
