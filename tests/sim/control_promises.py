"""The rules and promises, checked against the naive model after each event.

Owns: P1-P4, P6-P8 and rules 3-10 and 12 as assertions over a Truth, the commands of a plan and
the public view. Must not know: the scheduler's inside, how the shell answers.
Invariant: every expected value comes from the Truth; the view only says what the scheduler thinks.
"""

from collections import Counter
from dataclasses import dataclass, field

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.config import Overdue
from opengyre.control.ids import EngineId
from opengyre.control.step_record import StepState
from opengyre.control.view import SchedulerView
from tests.sim.control_model import CORE, ROUNDING_S, EngineLife, GroupLife, Truth

AWAY = (CellRole.LEAVING, CellRole.TRAINING)
RETRY_S = 1.0


@dataclass(kw_only=True)
class PlanSeen:
    """One plan in the making: its view before and after, and what was given in it so far."""

    before: SchedulerView
    after: SchedulerView
    roles_before: dict[int, CellRole]
    given: list[c.AnyCommand] = field(default_factory=list)

    @property
    def is_boundary(self) -> bool:
        return self.after.burst > self.before.burst

    @property
    def is_over(self) -> bool:
        return self.after.phase in (Phase.ENDING, Phase.ENDED)


# ---- after a plan


def check_view(truth: Truth, seen: PlanSeen, *, last_command_id: int) -> None:
    view = seen.after
    check_counts(truth, view)
    _check_groups(truth, view)
    _check_engines(truth, view)
    _check_prefix(truth, view)
    _check_waiting(truth, view)
    _check_evaluation(truth)
    if seen.is_boundary:
        _check_boundary(truth, seen)
    if view.phase is Phase.RUNNING and truth.stop is None:
        _check_slots(truth, view)
        _check_step(truth, view)
        _check_who_should_leave(truth, view)
        _check_who_should_be_recalled(truth, view)
    assert all(one.command_id <= last_command_id for one in seen.given)


def check_counts(truth: Truth, view: SchedulerView) -> None:
    """P1 and P2."""
    lives = truth.executions.values()
    assert view.dispatched == len(lives)
    assert view.launched == sum(one.is_launched for one in lives)
    assert view.finished == sum(one.outcome is not None for one in lives)
    assert view.waterlevel == truth.w == view.dispatched - view.finished
    assert 0 <= view.finished <= view.launched <= view.dispatched
    outcomes = Counter(one.outcome for one in lives if one.outcome is not None)
    assert {outcome: num for outcome, num in view.num_by_outcome if num} == dict(outcomes)


def _drops_later(truth: Truth, view: SchedulerView) -> None:
    """Overdue groups are dropped all at once, before another step opens and before a dispatch."""
    num_known = len(truth.of_state("dropped"))
    for group in truth.overdue() if view.num_dropped > num_known else ():
        group.is_dropped = True
    is_redo = bool(truth.undone or truth.interrupted)
    assert truth.step is None or is_redo or not truth.overdue(), "rule 5: not dropped"


def _check_groups(truth: Truth, view: SchedulerView) -> None:
    _drops_later(truth, view)
    states = Counter(truth.state(group) for group in truth.groups.values())
    shown = {
        "live": view.num_live,
        "ready": view.num_ready,
        "assigned": view.num_assigned,
        "consumed": view.num_consumed,
        "void": view.num_void,
        "dropped": view.num_dropped,
    }
    assert {state: num for state, num in shown.items() if num} == dict(states), f"{shown}"
    assert view.version == truth.version
    num_skipped = view.steps_done - len(truth.commits)
    assert num_skipped >= 0
    assert view.steps_done <= truth.config.num_steps
    assert view.num_empty_steps >= num_skipped
    consumed = [group for commit in truth.commits for group in commit.groups]
    assert len(consumed) == len(set(consumed)), "P8: a group was consumed twice"


def _check_engines(truth: Truth, view: SchedulerView) -> None:
    roles = tuple(one.role for one in truth.cells)
    assert view.role_by_cell == roles or _arrives_later(truth, view), f"{view.role_by_cell}"
    assert view.capacity == truth.capacity
    assert view.num_queued == len(truth.queued)
    assert view.num_displaced == len(truth.displaced), f"{view} | {truth.displaced}"
    for shown in view.engines:
        life = truth.engines[shown.engine]
        assert shown.num_used == truth.used(shown.engine) <= shown.slots
        assert (shown.state is EngineState.ABSENT) == (not life.is_alive)
        if life.is_alive:
            assert (shown.verified_version, shown.due_version) == (life.verified, life.due)
        if shown.state is EngineState.OPEN:
            assert life.is_door_open
            assert life.verified == life.due
    late = [one.engine for one in view.engines if one.state is EngineState.QUARANTINED]
    assert late == truth.quarantined()


def _arrives_later(truth: Truth, view: SchedulerView) -> bool:
    """A cell that has arrived in training still counts as leaving while routes change, and to
    the end of the run once that has begun."""
    if view.phase in (Phase.ENDING, Phase.ENDED):
        return True
    is_rerouting = any(isinstance(one, c.Reroute) for one in truth.unanswered.values())
    pairs = zip(view.role_by_cell, (one.role for one in truth.cells), strict=True)
    differ = [pair for pair in pairs if pair[0] is not pair[1]]
    return is_rerouting and differ == [(CellRole.LEAVING, CellRole.TRAINING)]


def _check_prefix(truth: Truth, view: SchedulerView) -> None:
    """P3 and P4; cells that died left the order, a boundary empties the prefix."""
    if view.phase is not Phase.RUNNING or any(view.is_returning_by_cell):
        return
    stable = [one for one in truth.cells if not (one.has_died or one.is_turning)]
    away = [one.role in AWAY for one in stable]
    assert away == sorted(away, reverse=True), "P4: the training set is no prefix"
    assert sum(not one.has_died for one in truth.with_role(CellRole.LEAVING)) <= 1, "rule 8"
    is_whole = all(one.is_alive for one in truth.engines.values()) and not truth.losses_s
    is_turning = any(one.is_turning for one in truth.with_role(CellRole.LEAVING))
    if is_whole and not truth.quarantined() and not is_turning and any(away):
        assert truth.capacity >= truth.w, "P3"


def _check_waiting(truth: Truth, view: SchedulerView) -> None:
    """P15: nothing is waited for in silence; P1 and rule 12 at the end."""
    if view.phase is not Phase.ENDED:
        assert view.waiting_for or truth.unanswered, "nobody knows what the run waits for"
        assert truth.end is None
        return
    assert truth.end is not None
    if not truth.end.failed:
        assert truth.w == 0
        assert truth.stop is not None or view.steps_done == truth.config.num_steps


def _check_evaluation(truth: Truth) -> None:
    """Rule 11: an evaluation past its deadline is told to end."""
    for given_s, executions in truth.eval_waves:
        if truth.end is not None or truth.now_s - given_s < truth.config.eval_deadline_s:
            continue
        lives = [truth.executions[one] for one in executions]
        assert all(one.outcome is not None or one.cancelled_s is not None for one in lives)


def _check_boundary(truth: Truth, seen: PlanSeen) -> None:
    """Rules 3 and 9: what is dispatched, and who goes back."""
    view = seen.after
    assert view.published_version == truth.exposed[-1] == truth.version
    num_left = truth.config.num_steps - view.steps_done
    given = [one for one in seen.given if isinstance(one, c.DispatchGroups)]
    if not given:
        assert num_to_dispatch(truth, num_left) == 0 or seen.is_over
    assert len(given) <= 1
    if num_left > 0 and not seen.is_over:
        _check_who_returns(truth, seen)


def _check_who_returns(truth: Truth, seen: PlanSeen) -> None:
    returning = {one.cell for one in seen.given if isinstance(one, c.LeaveTraining)}
    training = {cell for cell, role in seen.roles_before.items() if role is CellRole.TRAINING}
    assert training - {0} <= returning, "a satellite stays in training past the boundary"
    if 0 not in training:
        return
    num_ready = len(truth.of_state("ready"))
    is_supplied = min(num_ready, truth.config.groups_per_step) >= (
        truth.config.supply_fraction * truth.config.groups_per_step
    )
    late = truth.quarantined()
    others = [one for name, one in truth.engines.items() if name != CORE and name not in late]
    num_slots = sum(one.spec.slots for one in others if one.is_alive)
    is_retained = is_supplied and num_slots >= truth.w
    assert (0 not in returning) == is_retained, f"retention of the core: {num_slots} {truth.w}"


def _check_slots(truth: Truth, view: SchedulerView) -> None:
    """Rule 6: displaced first, then the queue; nothing waits beside a free slot."""
    is_rerouting = any(isinstance(one, c.Reroute) for one in truth.unanswered.values())
    is_free = any(
        one.state is EngineState.OPEN and one.num_used < one.slots for one in view.engines
    )
    if not is_free or _is_backing_off(truth):
        return
    assert is_rerouting or not truth.displaced, "a displaced execution waits beside a free slot"
    assert truth.displaced or not truth.queued, "the queue waits beside a free slot"


def _is_backing_off(truth: Truth) -> bool:
    return any(truth.now_s - failed_s < RETRY_S for failed_s in truth.failures_s)


def _check_step(truth: Truth, view: SchedulerView) -> None:
    """Rule 4: closed full or short, exactly when no more can come; rule 5: nobody held back."""
    step = truth.step
    assert (view.step is None) == (step is None)
    if step is None:
        return
    assert view.step == step.step
    assert view.need == truth.need
    if not step.is_open:
        assert view.step_state is StepState.OPENING
        return
    assert (view.step_state is StepState.CLOSING) == step.is_closing
    is_dropping = any(isinstance(one, c.DropMember) for one in truth.unanswered.values())
    assert step.is_closing or is_dropping or truth.need > 0, "rule 4: it does not close"
    if step.is_closing or step.is_exact:
        return
    _check_nothing_is_held_back(truth)


def _check_nothing_is_held_back(truth: Truth) -> None:
    """Rule 5, the other way round: who waits would push an older group past its bound."""
    assert truth.step is not None
    offered = {*truth.step.offered}
    taken = {group.group for group in truth.of_state("assigned")} | offered
    if len(taken) >= truth.config.groups_per_step:
        return
    held = [group for group in in_order(truth.of_state("ready")) if group.group not in taken]
    if not held:
        return
    assert truth.config.overdue is Overdue.WAIT, "a ready group was not offered"
    assert not may_overtake(truth, held[0], taken), f"{held[0].group} was held back in vain"


# ---- rule 7 and 10, the duty to act


def _check_who_should_leave(truth: Truth, view: SchedulerView) -> None:
    """The test runs at each event and timer: who may leave has left."""
    cell = truth.next_cell
    if cell is None or cell.role is not CellRole.ROLLOUT or not cell.is_door_open:
        return
    is_core = cell.spec.engine == CORE
    since_s = truth.supplied_since_s(is_core=is_core)
    is_held = since_s is not None and truth.now_s - since_s >= truth.config.supply_hold_s
    has_room = truth.capacity - cell.spec.slots >= truth.w
    if not (is_held and has_room) or _is_in_the_way(truth, view):
        return
    raise AssertionError(f"{cell.spec.engine} may leave and does not: {view.waiting_for}")


def _is_in_the_way(truth: Truth, view: SchedulerView) -> bool:
    is_moving = bool(truth.with_role(CellRole.LEAVING, CellRole.RETURNING))
    is_rerouting = any(isinstance(one, c.Reroute) for one in truth.unanswered.values())
    is_last_closed = (
        truth.step is not None
        and truth.step.is_closing
        and view.step_in_burst == view.steps_per_burst
    )
    is_redo = truth.step is not None and truth.step.is_exact
    waits = is_moving or is_rerouting or bool(truth.displaced) or is_last_closed or is_redo
    return waits or _is_backing_off(truth) or bool(truth.undone)


def _check_who_should_be_recalled(truth: Truth, view: SchedulerView) -> None:
    since_s = truth.short_since_s()
    if since_s is None or truth.now_s - since_s < truth.config.recall_after_s:
        return
    if _is_backing_off(truth) or any(view.is_returning_by_cell):
        return
    if truth.with_role(CellRole.LEAVING, CellRole.RETURNING) or truth.quarantined():
        return
    is_busy = any(isinstance(one, c.Checkpoint) for one in truth.unanswered.values())
    if truth.step is not None:
        is_busy = truth.step.is_closing or not truth.step.is_open
    assert is_busy or not truth.with_role(CellRole.TRAINING), "nobody was recalled"


# ---- at each command, before it counts


def check_command(truth: Truth, command: c.AnyCommand, seen: PlanSeen) -> None:
    assert command.reason.strip()
    assert command.command_id == len(truth.commands) + 1 or command.command_id > max(truth.commands)
    assert truth.end is None, "a command after the end"
    match command:
        case c.DispatchGroups() | c.DispatchEval():
            _check_dispatch(truth, command, seen)
        case c.Launch():
            _check_launch(truth, command)
        case c.Cancel():
            life = truth.executions[command.execution]
            assert life.outcome is None
            assert command.was_queued == (not life.is_launched)
        case c.CloseDoor() | c.Reroute() | c.Freeze() | c.OpenDoor() | c.Publish():
            _check_engine_command(truth, command, seen)
        case c.EnterTraining() | c.LeaveTraining():
            _check_role_command(truth, command, seen)
        case c.Fence():
            assert truth.engines[command.engine].is_alive
        case c.EndRun():
            assert command.failed or truth.w == 0
        case _:
            _check_step_command(truth, command, seen)


def num_to_dispatch(truth: Truth, num_steps_left: int) -> int:
    """Rule 3."""
    config = truth.config
    wanted = (config.run_ahead + config.steps_per_burst) * config.groups_per_step
    wanted = min(wanted, num_steps_left * config.groups_per_step)
    return max(0, wanted - len(truth.outstanding))


def _check_dispatch(
    truth: Truth, command: c.DispatchGroups | c.DispatchEval, seen: PlanSeen
) -> None:
    assert truth.step is None, "a dispatch while a step is open"
    assert truth.exposed, "a dispatch before a publication"
    assert command.version == truth.version == truth.exposed[-1], "rule 3: the version"
    assert truth.stop is None
    if isinstance(command, c.DispatchEval):
        assert len(command.executions) == truth.config.num_eval_executions
        is_last = seen.after.steps_done == truth.config.num_steps
        assert seen.is_boundary or is_last, "an evaluation inside a burst"
        return
    assert seen.is_boundary, "a dispatch inside a burst"
    assert command.burst == seen.after.burst
    num_left = truth.config.num_steps - seen.after.steps_done
    assert len(command.groups) == num_to_dispatch(truth, num_left), "rule 3: the number"
    for _, members in command.groups:
        assert len(members) == truth.config.group_size
        assert not {*members} & {*truth.executions}


def _check_launch(truth: Truth, command: c.Launch) -> None:
    """Rule 6 and P6: dispatch order, an open engine of the due version with a free slot."""
    life = truth.executions[command.execution]
    assert truth.queued[0] is life, "rule 6: not the first of the queue"
    assert not truth.displaced, "rule 6: displaced executions first"
    _check_destination(truth, command.engine)
    assert truth.engines[command.engine].is_door_open
    assert truth.used(command.engine) < truth.engines[command.engine].spec.slots


def _check_destination(truth: Truth, name: EngineId, *, is_held: bool = False) -> None:
    """What moves off a leaving cell may be held at a door that a publication has shut."""
    engine = truth.engines[name]
    assert truth.counts_in_capacity(engine), f"{name} does not serve"
    is_shut = is_held and not engine.is_door_open
    assert is_shut or engine.verified == engine.due, f"P6: {name}"


def _check_engine_command(
    truth: Truth,
    command: c.CloseDoor | c.Reroute | c.Freeze | c.OpenDoor | c.Publish,
    seen: PlanSeen,
) -> None:
    match command:
        case c.CloseDoor():
            _check_leaving(truth, truth.engines[command.engine], seen)
        case c.Reroute():
            _check_reroute(truth, command)
        case c.Freeze():
            assert truth.used(command.engine) == 0, "2.2: routes before the freeze"
            assert not truth.engines[command.engine].is_door_open
        case c.OpenDoor():
            engine = truth.engines[command.engine]
            assert engine.verified == engine.due, "P6: a door opens under the wrong version"
            assert engine.role is not CellRole.TRAINING
        case c.Publish():
            assert command.version in truth.exposed
            assert command.version <= truth.durable_version, "2.5.5"
            assert command.version == truth.exposed[-1]
            engine = truth.engines[command.engine]
            assert engine.role in (CellRole.ROLLOUT, CellRole.LEAVING) or engine.spec.cell is None
            is_core_busy = command.engine == CORE and truth.step is not None
            assert not is_core_busy, "P7: the core loads while its step is open"


def _check_leaving(truth: Truth, engine: EngineLife, seen: PlanSeen) -> None:
    """Rules 7, 8 and 10 at the moment a cell leaves."""
    config = truth.config
    assert seen.after.phase is Phase.RUNNING
    moving = truth.with_role(CellRole.LEAVING, CellRole.RETURNING)
    roles = seen.after.role_by_cell
    back = [one for one in moving if roles[one.spec.cell or 0] is CellRole.ROLLOUT]
    assert moving == back, "7a"
    is_last = seen.after.step_in_burst == seen.after.steps_per_burst
    assert not (is_last and truth.step is not None and truth.step.is_closing), "7a"
    capacity = truth.capacity + sum(one.spec.slots for one in back)
    assert capacity - engine.spec.slots >= truth.w, "7b"
    assert not truth.displaced
    assert truth.next_cell is engine, "rule 8"
    since_s = truth.supplied_since_s(is_core=engine.spec.engine == CORE)
    assert since_s is not None, "7c: no supply"
    assert truth.now_s - since_s >= config.supply_hold_s - ROUNDING_S, "7c: not held"


def _check_reroute(truth: Truth, command: c.Reroute) -> None:
    """2.2.2: standalone engines first, then cells in descending index; every slot is free."""
    assert command.moves
    pending = [one for one in truth.unanswered.values() if isinstance(one, c.Reroute)]
    assert not pending, "two route changes at once"
    arriving = Counter(engine for _, engine in command.moves)
    sources = {truth.executions[one].place for one, _ in command.moves}
    for name, num in arriving.items():
        _check_destination(truth, name, is_held=sources != {None})
        assert truth.used(name) + num <= truth.engines[name].spec.slots
    assert len(sources) == 1
    source = sources.pop()
    if source is None:
        displaced = [one.execution for one in truth.displaced]
        assert {one for one, _ in command.moves} <= {*displaced}
        return
    assert truth.engines[source].role is CellRole.LEAVING
    assert len(command.moves) == truth.used(source)
    _check_stay_order(truth, arriving)


def _check_stay_order(truth: Truth, arriving: Counter[EngineId]) -> None:
    """A cell is used only when everything that stays longer is full."""
    places = [one for one in truth.engines.values() if truth.counts_in_capacity(one)]
    places.sort(key=lambda one: -1 if one.spec.cell is None else len(places) - one.spec.cell)
    cells = [one.spec.cell for one in places if one.spec.cell is not None]
    for cell in sorted(cells):
        if not arriving[truth.cells[cell].spec.engine]:
            continue
        for one in places:
            if one.spec.cell is None or one.spec.cell > cell:
                name = one.spec.engine
                assert truth.used(name) + arriving[name] == one.spec.slots, "2.2.2"


def _check_role_command(
    truth: Truth, command: c.EnterTraining | c.LeaveTraining, seen: PlanSeen
) -> None:
    cell = truth.cells[command.cell]
    assert cell.is_alive
    if isinstance(command, c.EnterTraining):
        assert truth.used(cell.spec.engine) == 0
        is_redo = command.cell == 0 and bool(truth.undone or truth.interrupted)
        assert cell.role is CellRole.LEAVING or is_redo
        return
    assert cell.role is CellRole.TRAINING
    assert not (command.cell == 0 and truth.step is not None), "P7: the core leaves an open step"
    is_recall = seen.before.phase is Phase.RUNNING and not seen.is_boundary
    if not is_recall or seen.before.is_returning_by_cell[command.cell]:
        assert command.version == truth.exposed[-1]
        return
    is_last = truth.with_role(CellRole.TRAINING)[-1] is cell
    assert is_last, "rule 10: the last of the prefix is recalled"
    assert command.cell == 0 or truth.capacity < truth.w, "rule 10: a recall without need"


# ---- steps


def _check_step_command(truth: Truth, command: c.AnyCommand, seen: PlanSeen) -> None:
    match command:
        case c.OpenStep():
            _check_open(truth, command, seen)
        case c.Admit():
            assert truth.step is not None
            assert (truth.step.step, truth.step.is_closing) == (command.step, False), "2.3.2"
            assert truth.cells[command.cell].role is CellRole.TRAINING
        case c.Offer():
            _check_offer(truth, command)
        case c.CloseStep():
            _check_close(truth, command)
        case c.AbandonStep():
            is_of_dead_core = truth.now_s in truth.core_losses_s
            assert is_of_dead_core if truth.step is None else truth.step.step == command.step
            is_recall = not (is_of_dead_core or seen.is_over)
            assert not is_recall or truth.capacity < truth.w, "rule 10: a recall without need"
        case c.Checkpoint() | c.Expose():
            assert truth.step is None, "P7: a publication while a step is open"
            assert command.version == truth.version
            if isinstance(command, c.Expose):
                assert command.version == truth.durable_version, "2.5.5"
        case _:
            return


def _check_open(truth: Truth, command: c.OpenStep, seen: PlanSeen) -> None:
    """P7: one step at a time, in order, under the version of all updates so far."""
    assert truth.step is None, "P7: two open steps"
    assert command.version == truth.version, "P7"
    assert command.step <= truth.config.num_steps
    assert not truth.commits or command.step > truth.commits[-1].step
    assert truth.cells[0].role is CellRole.TRAINING
    is_abandoning = any(isinstance(one, c.AbandonStep) for one in truth.unanswered.values())
    assert not is_abandoning, "a step opens before the abandoned one is gone"
    assert seen.after.phase is Phase.RUNNING


def _check_offer(truth: Truth, command: c.Offer) -> None:
    """Rule 5: only ready groups, at most B with the assigned ones, no older one pushed out."""
    step, config = truth.step, truth.config
    assert step is not None
    assert step.step == command.step
    assert step.is_open
    assert not step.is_closing
    assigned = {group.group for group in truth.of_state("assigned")}
    assert len(command.groups) + len(assigned) <= config.groups_per_step
    before = {name for name in step.offered if name not in assigned}
    assert before <= {*command.groups}, "an offer was taken back"
    taken = assigned | before
    for group in in_order([truth.groups[name] for name in command.groups]):
        assert truth.state(group) == "ready"
        assert step.version <= truth.deadline(group), "rule 5: past the bound"
        if group.group in before:
            continue
        if step.is_exact:
            assert group.group in step.fixed
        elif group.group not in step.fixed and config.overdue is Overdue.WAIT:
            assert may_overtake(truth, group, taken), f"rule 5: {group.group} overtakes"
        taken.add(group.group)


def in_order(groups: list[GroupLife]) -> list[GroupLife]:
    """Oldest version first, then dispatch order."""
    return sorted(groups, key=lambda one: (one.version, one.group))


def may_overtake(truth: Truth, group: GroupLife, taken: set[str] | set[object]) -> bool:
    """With it in this step, every older unassigned group still finds a place in time."""
    assert truth.step is not None
    num_now = truth.config.groups_per_step - len(taken) - 1
    older = [
        one
        for one in truth.of_state("live", "ready")
        if one.version < group.version and one.group not in taken
    ]
    for deadline in {truth.deadline(one) for one in older}:
        num_due = sum(truth.deadline(one) <= deadline for one in older)
        num_steps = deadline - truth.step.version
        if num_due > num_now + num_steps * truth.config.groups_per_step:
            return False
    return num_now >= 0


def _check_close(truth: Truth, command: c.CloseStep) -> None:
    step = truth.step
    assert step is not None
    assert step.step == command.step
    assert step.is_open
    assert not step.is_closing
    groups = truth.of_state("assigned")
    assert truth.need == 0, "rule 4: closed while more can come"
    assert command.num_groups == len(groups)
    for group in groups:
        assert step.version <= truth.deadline(group), "rule 5: staleness"
    if step.is_exact:
        assert {group.group for group in groups} == step.fixed, "a redo takes the same groups"
    else:
        kept = {name for name in step.fixed if not truth.groups[name].is_dropped}
        assert kept <= {group.group for group in groups}


def check_fact(truth: Truth, fact: f.Fact) -> None:
    """What only the shell can break is asserted here, so that the model proves its own shell."""
    if isinstance(fact, f.StepCommitted):
        assert truth.step is not None
        assert fact.version in (truth.step.version, truth.step.version + 1)
