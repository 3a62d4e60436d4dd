"""The rules and promises, checked against the naive model after each plan.

Owns: P1-P4 and rules 3-6, 9-12 over a Truth and the public view, and the duty to act of rules 7
and 10. Must not know: the scheduler's inside, how the shell answers.
Invariant: every expected value comes from the Truth; the view only says what the scheduler thinks.
"""

from collections import Counter

from opengyre.control import commands as c
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.config import PolicyName
from opengyre.control.step_record import StepState
from opengyre.control.view import SchedulerView
from tests.sim.control_command_promises import PlanSeen
from tests.sim.control_model import CORE, Truth
from tests.sim.control_order import is_supplied_at_boundary, num_to_dispatch, takeable

AWAY = (CellRole.LEAVING, CellRole.TRAINING)
RETRY_S = 1.0


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
    left = [one.engine for one in seen.given if isinstance(one, c.CloseDoor)]
    assert left == [one.spec.engine for one in seen.leaving], "rule 13: not all leave together"


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


def drop_overdue(truth: Truth, seen: PlanSeen) -> None:
    """Before another step opens, and at a boundary before the dispatch counts."""
    is_now = seen.is_boundary or seen.after.num_dropped > len(truth.of_state("dropped"))
    for group in truth.overdue() if is_now else ():
        group.is_dropped = True


def _check_groups(truth: Truth, view: SchedulerView) -> None:
    is_redo = bool(truth.undone or truth.interrupted)
    assert truth.step is None or is_redo or not truth.overdue(), "rule 5: not dropped"
    states = Counter(truth.state(group) for group in truth.groups.values())
    shown = {
        "live": view.num_live,
        "ready": view.num_ready,
        "assigned": view.num_assigned,
        "consumed": view.num_consumed,
        "void": view.num_void,
        "filtered": view.num_filtered,
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
    return is_rerouting and {*differ} == {(CellRole.LEAVING, CellRole.TRAINING)}


def _check_prefix(truth: Truth, view: SchedulerView) -> None:
    """P3 and P4; cells that died left the order, a boundary empties the prefix."""
    if view.phase is not Phase.RUNNING or any(view.is_returning_by_cell):
        return
    stable = [one for one in truth.cells if not (one.has_died or one.is_turning)]
    away = [one.role in AWAY for one in stable]
    is_whole = all(one.is_alive for one in truth.engines.values()) and not truth.losses_s
    is_whole &= not truth.quarantined()
    leaving = truth.with_role(CellRole.LEAVING)
    match truth.config.policy:
        case PolicyName.ELASTIC:
            assert away == sorted(away, reverse=True), "P4: the training set is no prefix"
            assert sum(not one.has_died for one in leaving) <= 1, "rule 8"
        case PolicyName.COLOCATE:
            is_broken = not is_whole or bool(truth.failures_s)
            assert is_broken or len({*away}) <= 1, "rule 13: they switch together"
        case PolicyName.ASYNC:
            split = truth.cells[: truth.config.num_training_cells]
            lasting = [one for one in truth.cells if not one.has_died]
            always = [one for one in split if not one.has_died]
            assert [one for one in lasting if one.role in AWAY] == always, "the split moved"
            return
    is_turning = any(one.is_turning for one in leaving)
    if is_whole and not is_turning and any(away):
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
    """Rules 9 and 13: elastic may retain the core, colocate all cells or none, async moves none."""
    returning = {one.cell for one in seen.given if isinstance(one, c.LeaveTraining)}
    now = seen.after.role_by_cell
    roles = seen.roles_before.items()
    training = {
        cell
        for cell, role in roles
        if role is CellRole.TRAINING and now[cell] is not CellRole.LEAVING
    }
    if truth.config.policy is PolicyName.ASYNC:
        assert not returning, "a cell of the fixed split returns"
        return
    able = {0} & training
    if truth.config.policy is PolicyName.COLOCATE:
        living = {cell for cell, role in roles if role is not CellRole.ABSENT}
        able = living if living == training else set()
    assert training - able <= returning, "a cell stays in training past the boundary"
    if not able:
        return
    late = truth.quarantined()
    others = [one for name, one in truth.engines.items() if name not in late and one.is_alive]
    num_slots = sum(one.spec.slots for one in others if one.spec.cell not in able)
    is_retained = is_supplied_at_boundary(truth) and num_slots >= truth.w
    expected = set() if is_retained else able
    assert able & returning == expected, f"retention: {num_slots} slots, {truth.w}"


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
    assigned = {group.group for group in truth.of_state("assigned")}
    offered = {*truth.step.offered} - assigned
    held = takeable(truth, assigned | offered)
    is_whole = len(offered) + len(held) >= truth.need
    if truth.config.is_streaming or is_whole:
        assert not held, f"{held[0].group} was held back in vain"


# ---- rule 7 and 10, the duty to act


def _check_who_should_leave(truth: Truth, view: SchedulerView) -> None:
    """The test runs at each event and timer: who may leave has left."""
    cells = truth.next_cells
    if not all(one.role is CellRole.ROLLOUT and one.is_door_open for one in cells) or not cells:
        return
    since_s = truth.supplied_since_s(is_core=cells[0].spec.engine == CORE)
    is_held = since_s is not None and truth.now_s - since_s >= truth.config.supply_hold_s
    has_room = truth.capacity - sum(one.spec.slots for one in cells) >= truth.w
    if not (is_held and has_room) or _is_in_the_way(truth, view):
        return
    raise AssertionError(f"{cells[0].spec.engine} may leave and does not: {view.waiting_for}")


def _is_in_the_way(truth: Truth, view: SchedulerView) -> bool:
    is_moving = bool(truth.with_role(CellRole.LEAVING, CellRole.RETURNING))
    is_rerouting = any(isinstance(one, c.Reroute) for one in truth.unanswered.values())
    is_last_closed = (
        truth.step is not None
        and truth.step.is_closing
        and view.step_in_burst == view.steps_per_burst
    )
    is_redo = truth.step is not None and truth.step.is_exact
    is_moving |= any(isinstance(one, c.Checkpoint) for one in truth.unanswered.values())
    waits = is_moving or is_rerouting or bool(truth.displaced) or is_last_closed or is_redo
    return waits or _is_backing_off(truth) or bool(truth.undone)


def _check_who_should_be_recalled(truth: Truth, view: SchedulerView) -> None:
    since_s = truth.short_since_s()
    if truth.config.policy is PolicyName.ASYNC:
        return
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
