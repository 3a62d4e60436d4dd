"""What each fact, each command and the passing of time changes in the naive model.

Owns: the lives' changes. Must not know: the scheduler's inside, what should have happened.
"""

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.answers import MAX_DROP_FAILURES
from opengyre.control.cells import CellRole
from opengyre.control.ids import EngineId
from tests.sim.control_lives import Commit, EngineLife, ExecutionLife, GroupLife, Sample, StepLife
from tests.sim.control_model import CORE, Truth


def add(truth: Truth, now_s: float, body: f.Fact | c.AnyCommand) -> None:
    """One more thing that happened: a fact that was true, or a command that was given."""
    truth.now_s = now_s
    roles = [one.role for one in truth.cells]
    if isinstance(body, c.Command):
        truth.commands[body.command_id] = body  # type: ignore[assignment]
        truth.unanswered[body.command_id] = body  # type: ignore[assignment]
        _commanded(truth, body)
    else:
        _told(truth, body)
    _note_ends(truth)
    is_opened = isinstance(body, f.CommandApplied) and isinstance(
        truth.commands[body.command_id], c.OpenStep
    )
    truth.samples.append(
        Sample(
            now_s=truth.now_s,
            is_supplied=truth.is_supplied(is_core=False),
            is_supplied_for_core=truth.is_supplied(is_core=True),
            is_short=truth.capacity < truth.w,
            has_opened_a_step=is_opened,
            has_changed_roles=roles != [one.role for one in truth.cells],
        )
    )


def pass_time(truth: Truth, now_s: float) -> None:
    """2.5.4: an engine that is late with its version leaves C_R, its executions are displaced."""
    truth.now_s = now_s
    late = truth.quarantined()
    for life in truth.executions.values():
        if life.place in late:
            life.place = None


def pass_boundary(truth: Truth, steps_done: int) -> None:
    """Cells that died in the burst and live again are members again."""
    truth.is_exposing = False
    truth.steps_before_burst = steps_done
    for cell in truth.cells:
        cell.has_died = not cell.is_alive
        cell.is_turning = cell.role is CellRole.LEAVING


def _note_ends(truth: Truth) -> None:
    ended = {group for group, _ in truth.ended_groups}
    for group in truth.groups.values():
        if group.group not in ended and not group.is_dropped and truth.has_ended(group):
            truth.ended_groups.append((group.group, truth.is_trainable(group)))


# ---- commands


def _commanded(truth: Truth, command: c.Command) -> None:
    match command:
        case c.DispatchGroups() | c.DispatchEval():
            _dispatched(truth, command)
        case c.Launch():
            life = truth.executions[command.execution]
            life.is_launched, life.place = True, command.engine
        case c.Cancel():
            _cancelled(truth, command)
        case c.Reroute():
            _rerouted(truth, command)
        case c.EndRun():
            truth.end = command
        case _:
            _commanded_engine(truth, command)


def _dispatched(truth: Truth, command: c.DispatchGroups | c.DispatchEval) -> None:
    if isinstance(command, c.DispatchEval):
        truth.eval_waves.append((truth.now_s, command.executions))
        for one in command.executions:
            truth.executions[one] = ExecutionLife(execution=one, group=None)
        return
    for group, members in command.groups:
        truth.groups[group] = GroupLife(group=group, version=command.version, members=members)
        for one in members:
            truth.executions[one] = ExecutionLife(execution=one, group=group)


def _rerouted(truth: Truth, command: c.Reroute) -> None:
    lives = {one: truth.executions[one] for one, _ in command.moves}
    truth.sources[command.command_id] = {one: life.place for one, life in lives.items()}
    for one, engine in command.moves:
        if lives[one].outcome is None:
            lives[one].place = engine


def _cancelled(truth: Truth, command: c.Cancel) -> None:
    life = truth.executions[command.execution]
    life.cancelled_s = truth.now_s
    if command.was_queued:
        life.is_launched, life.outcome, life.is_valid = True, f.Outcome.CANCELLED, False


def _commanded_engine(truth: Truth, command: c.Command) -> None:
    match command:
        case c.CloseDoor():
            engine = truth.engines[command.engine]
            engine.role, engine.is_door_open = CellRole.LEAVING, False
            engine.is_turning = False
        case c.OpenDoor():
            _serves(truth.engines[command.engine])
        case c.Publish():
            engine = truth.engines[command.engine]
            _serves(engine)
            engine.due, engine.due_since_s, engine.is_door_open = (
                command.version,
                truth.now_s,
                False,
            )
        case c.Fence():
            _lost(truth, command.engine)
        case c.EnterTraining():
            engine = truth.cells[command.cell]
            engine.role, engine.is_door_open = CellRole.LEAVING, False
            truth.is_core_wanted &= command.cell != 0
        case c.LeaveTraining():
            engine = truth.cells[command.cell]
            engine.role, engine.is_door_open = CellRole.RETURNING, False
            engine.due = command.version
        case _:
            _commanded_step(truth, command)


def _serves(engine: EngineLife) -> None:
    if engine.spec.cell is not None:
        engine.role = CellRole.ROLLOUT


def _commanded_step(truth: Truth, command: c.Command) -> None:
    match command:
        case c.OpenStep():
            undone = truth.undone.get(command.step)
            fixed = truth.interrupted.get(command.step, frozenset())
            truth.step = StepLife(
                step=command.step,
                version=command.version,
                fixed=fixed if undone is None else undone.groups,
                is_exact=undone is not None,
            )
        case c.Offer() if truth.step is not None:
            truth.step.offered = command.groups
        case c.CloseStep() if truth.step is not None:
            truth.step.is_closing = True
        case c.AbandonStep():
            _unassign(truth)
            truth.step = None
        case c.Expose():
            truth.is_exposing = True
        case _:
            return


def _unassign(truth: Truth) -> None:
    for group in truth.of_state("assigned"):
        group.assigned_to = None


# ---- facts


def _told(truth: Truth, fact: f.Fact) -> None:
    match fact:
        case f.EngineReady():
            _lost(truth, fact.engine)
            engine = truth.engines[fact.engine]
            engine.is_alive, engine.verified, engine.due = True, fact.version, fact.version
            engine.due_since_s = None
            _serves(engine)
        case f.EngineLost():
            _lost(truth, fact.engine)
        case f.ExecutionClosed():
            life = truth.executions[fact.execution]
            life.outcome, life.place = fact.outcome, None
        case f.VerdictGiven():
            life = truth.executions[fact.execution]
            life.is_valid = fact.reward is not None and fact.exclusion == ""
            life.value = fact.reward if fact.shaped is None else fact.shaped
        case f.StopRequested():
            truth.stop = truth.stop or fact
        case f.CommandApplied():
            _applied(truth, truth.commands[fact.command_id])
            truth.unanswered.pop(fact.command_id, None)
        case f.CommandFailed() | f.CommandUnknown():
            _failed(truth, fact)
            truth.unanswered.pop(fact.command_id, None)
        case _:
            _told_step(truth, fact)


def _told_step(truth: Truth, fact: f.Fact) -> None:
    match fact:
        case f.GroupAssigned():
            truth.groups[fact.group].assigned_to = fact.step
        case f.GroupReturned():
            if truth.step is not None and not truth.step.is_closing:
                truth.groups[fact.group].assigned_to = None
        case f.StepCommitted():
            _committed(truth, fact)
        case _:
            return


def _committed(truth: Truth, fact: f.StepCommitted) -> None:
    assert truth.step is not None
    groups = truth.of_state("assigned")
    for group in groups:
        group.assigned_to, group.consumed_by = None, fact.step
    truth.commits.append(
        Commit(
            step=fact.step,
            version_before=truth.step.version,
            version=fact.version,
            groups=frozenset(group.group for group in groups),
        )
    )
    truth.undone.pop(fact.step, None)
    truth.interrupted.pop(fact.step, None)
    truth.step = None


def _lost(truth: Truth, name: EngineId) -> None:
    engine = truth.engines[name]
    if not engine.is_alive:
        return
    is_burst_on = bool(truth.with_role(CellRole.TRAINING)) or truth.is_core_wanted
    if name == CORE and is_burst_on:
        truth.is_core_wanted = not truth.is_exposing
    engine.is_alive, engine.role = False, CellRole.ABSENT
    engine.verified = engine.due = engine.due_since_s = None
    engine.is_door_open = False
    engine.has_died = True
    truth.losses_s.append(truth.now_s)
    for life in truth.executions.values():
        if life.place == name:
            life.place = None
    if name == CORE:
        _lost_core(truth)


def _lost_core(truth: Truth) -> None:
    """What was not durable is undone: its groups are trained again in the same steps."""
    truth.core_losses_s.append(truth.now_s)
    if truth.step is not None:
        assigned = frozenset(group.group for group in truth.of_state("assigned"))
        if truth.step.step not in truth.undone:
            truth.interrupted[truth.step.step] = assigned
    _unassign(truth)
    truth.step = None
    for commit in [one for one in truth.commits if one.step > truth.durable_step]:
        truth.commits.remove(commit)
        truth.undone[commit.step] = commit
        for name in commit.groups:
            truth.groups[name].consumed_by = None


def _applied(truth: Truth, command: c.AnyCommand) -> None:
    match command:
        case c.OpenDoor():
            engine = truth.engines[command.engine]
            engine.is_door_open = engine.due_since_s is None
        case c.Publish():
            engine = truth.engines[command.engine]
            engine.verified = command.version
            if engine.due == command.version:
                engine.due_since_s, engine.is_door_open = None, True
        case c.EnterTraining():
            truth.cells[command.cell].role = CellRole.TRAINING
        case c.LeaveTraining():
            engine = truth.cells[command.cell]
            engine.role, engine.verified = CellRole.ROLLOUT, command.version
        case c.OpenStep():
            if truth.step is not None:
                truth.step.is_open = True
        case c.Checkpoint():
            truth.durable_step, truth.durable_version = command.step, command.version
        case c.Expose():
            truth.exposed.append(command.version)
        case _:
            return


def _failed(truth: Truth, fact: f.CommandFailed | f.CommandUnknown) -> None:
    command = truth.commands[fact.command_id]
    truth.failures_s.append(truth.now_s)
    match command:
        case c.Launch() if isinstance(fact, f.CommandFailed):
            life = truth.executions[command.execution]
            life.outcome, life.is_valid, life.place = f.Outcome.FAILED, False, None
        case c.Reroute():
            _reroute_failed(truth, command, is_unknown=isinstance(fact, f.CommandUnknown))
        case c.DispatchGroups() | c.DispatchEval() | c.Checkpoint() | c.Offer():
            truth.fatal.append(f"{type(command).__name__} failed")
        case c.DropMember():
            truth.failed_drops[command.step, command.cell] += 1
            if truth.failed_drops[command.step, command.cell] >= MAX_DROP_FAILURES:
                truth.fatal.append("the stream does not drop a member")
        case _:
            return


def _reroute_failed(truth: Truth, command: c.Reroute, *, is_unknown: bool) -> None:
    """Back at the source if that is still there, else displaced; nobody knows: placed anew."""
    for one, engine in command.moves:
        life = truth.executions[one]
        if life.place != engine:
            continue
        source = truth.sources[command.command_id][one]
        is_there = source is not None and truth.engines[source].is_alive and not is_unknown
        life.place = source if is_there else None
