"""Each command of a plan, checked against the naive model before it counts.

Owns: P6-P8 and rules 3-10 and 12 as conditions of a command. Must not know: the scheduler's inside,
how the shell answers.
Invariant: every expected value comes from the Truth; the view only says what the scheduler thinks.
"""

from collections import Counter
from dataclasses import dataclass, field

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole
from opengyre.control.config import Overdue, PolicyName
from opengyre.control.ids import EngineId
from opengyre.control.view import SchedulerView
from tests.sim.control_lives import ROUNDING_S, EngineLife
from tests.sim.control_model import CORE, Truth
from tests.sim.control_order import in_order, may_overtake, num_to_dispatch


@dataclass(kw_only=True)
class PlanSeen:
    """One plan in the making: its view before and after, what was given in it so far, and the
    cells that were to leave together as the first of them was told."""

    before: SchedulerView
    after: SchedulerView
    roles_before: dict[int, CellRole]
    given: list[c.AnyCommand] = field(default_factory=list)
    leaving: list[EngineLife] = field(default_factory=list)

    @property
    def is_boundary(self) -> bool:
        return self.after.burst > self.before.burst

    @property
    def is_over(self) -> bool:
        return self.after.phase in (Phase.ENDING, Phase.ENDED)


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
    closed = [one.engine for one in seen.given if isinstance(one, c.CloseDoor)]
    moving = truth.with_role(CellRole.LEAVING, CellRole.RETURNING)
    moving = [one for one in moving if one.spec.engine not in closed]
    roles = seen.after.role_by_cell
    back = [one for one in moving if roles[one.spec.cell or 0] is CellRole.ROLLOUT]
    assert moving == back, "7a"
    is_last = seen.after.step_in_burst == seen.after.steps_per_burst
    assert not (is_last and truth.step is not None and truth.step.is_closing), "7a"
    capacity = truth.capacity + sum(one.spec.slots for one in back)
    assert capacity - engine.spec.slots >= truth.w, "7b"
    assert not truth.displaced
    if closed:
        assert engine in seen.leaving, "rules 8 and 13"
        return
    seen.leaving = truth.next_cells
    assert engine in seen.leaving, "rules 8 and 13"
    since_s = truth.supplied_since_s(is_core=seen.leaving[0].spec.engine == CORE)
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
        is_bound = command.cell == 0 and truth.is_core_wanted
        is_bound |= command.cell < truth.config.num_training_cells
        assert cell.role is CellRole.LEAVING or is_bound
        return
    assert cell.role is CellRole.TRAINING
    assert truth.config.policy is not PolicyName.ASYNC, "a cell of the fixed split returns"
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
    is_whole = len(command.groups) >= truth.need
    assert config.is_streaming or is_whole, "offered before the whole step can be"
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
