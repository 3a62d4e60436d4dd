"""Every promise that can be seen in one state, or across one event.

Owns: P1-P4, P6-P8 in the form in which they are checked after each event. Must not know: how
states are found or folded, the scheduler's inside beyond what it has pending.
"""

from fractions import Fraction
from math import ceil

from opengyre.control import commands as c
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.run_state import RunState
from opengyre.control.scheduler import Scheduler
from opengyre.control.view import SchedulerView
from tests.sim.exhaustive_world import Shape, World

AWAY = (CellRole.LEAVING, CellRole.TRAINING)
UP = (EngineState.ABSENT, EngineState.QUARANTINED)
SHUT = (EngineState.SHUT, EngineState.OPENING, EngineState.PUBLISHING)
RECALLED = "is recalled"
NO_SLOTS = (Phase.ENDING, Phase.ENDED)


def check_plan(
    w_before: int, plan: c.Plan, after: SchedulerView, world: World, shape: Shape
) -> None:
    """`w_before`: as the facts came in; `after`: with the plan's commands given."""
    dispatched = [one for one in plan.commands if isinstance(one, c.DispatchGroups)]
    assert after.waterlevel <= w_before or dispatched, "w rose between two boundaries"
    num_doors = 0
    for command in plan.commands:
        assert command.reason
        if isinstance(command, c.DispatchGroups):
            _check_dispatch(after, command, shape)
        elif isinstance(command, c.CloseDoor):
            num_doors += 1
            _check_leaving(after, command, world, shape)
        elif RECALLED in command.reason:
            assert after.capacity < after.waterlevel, "recalled although C_R >= w"
    assert num_doors <= 1, "two cells leave at once"


def _check_dispatch(view: SchedulerView, command: c.DispatchGroups, shape: Shape) -> None:
    """Rule 3."""
    config = shape.config
    ahead = min(config.run_ahead + config.steps_per_burst, config.num_steps - view.steps_done)
    most = ceil(Fraction(str(config.oversample)) * ahead * config.groups_per_step)
    assert view.num_live + view.num_ready + view.num_assigned <= most
    assert command.version == view.version == view.published_version
    assert view.phase is Phase.RUNNING


def _check_leaving(view: SchedulerView, command: c.CloseDoor, world: World, shape: Shape) -> None:
    """Rules 7 and 8."""
    cell = world.machines[command.engine].cell
    config, roles = shape.config, view.role_by_cell
    assert cell is not None
    assert view.phase is Phase.RUNNING
    assert not any(view.is_returning_by_cell), "a cell leaves while another returns"
    assert view.capacity >= view.waterlevel, "C_R - C_e < w"
    assert view.num_displaced == 0, "displaced executions come first"
    is_shut = any(one.state in SHUT for one in view.engines if one.engine != command.engine)
    assert view.num_queued == 0 or is_shut, "a cell leaves beside a queue"
    supply = min(view.num_ready, config.groups_per_step - view.num_assigned)
    is_last = cell == 0 and view.num_live == 0 and view.num_ready > 0
    assert supply >= config.min_supply_groups or is_last, "a cell leaves without supply"
    for earlier in range(cell):
        is_gone = roles[earlier] is CellRole.ABSENT or earlier in world.died_in_burst
        assert roles[earlier] is CellRole.TRAINING or (is_gone and earlier > 0), "out of order"


def check_state(scheduler: Scheduler, view: SchedulerView, world: World, shape: Shape) -> None:
    _check_counts(view, world)
    _check_engines(view, world)
    _check_cells(scheduler, view, world, shape)
    _check_answers(scheduler, world)
    _check_slots(view)
    _check_indexes(scheduler._run)
    if world.end is not None:
        _check_end(view, world, world.end)


def _check_counts(view: SchedulerView, world: World) -> None:
    """P2, and each group in one state."""
    w = world.num_dispatched - world.num_closed
    assert view.waterlevel == w, "w is not the number of unfinished executions"
    counts = (view.dispatched, view.launched, view.finished)
    assert counts == (world.num_dispatched, world.num_launched, world.num_closed)
    assert 0 <= view.finished <= view.launched <= view.dispatched
    assert sum(one.num_used for one in view.engines) + view.num_queued + view.num_displaced == w
    assert w == view.num_queued + len(world.route)
    num = view.num_live + view.num_ready + view.num_assigned
    num += view.num_void + view.num_filtered + view.num_consumed + view.num_dropped
    assert num == len(world.version_by_group), "a group is in no state, or in two"


def _check_engines(view: SchedulerView, world: World) -> None:
    """P6."""
    for one in view.engines:
        machine = world.machines[one.engine]
        assert 0 <= one.num_used <= one.slots
        assert (one.state is EngineState.ABSENT) != machine.is_alive
        if one.state is EngineState.OPEN:
            assert one.verified_version == one.due_version == machine.version
            assert machine.is_door_open
            assert not machine.is_training
        if one.cell is not None:
            role = view.role_by_cell[one.cell]
            assert role is not CellRole.TRAINING or machine.is_training
            assert role is not CellRole.ROLLOUT or not machine.is_training
            assert one.num_used == 0 or role in (CellRole.ROLLOUT, CellRole.LEAVING)


def _check_cells(scheduler: Scheduler, view: SchedulerView, world: World, shape: Shape) -> None:
    """P3 and P4; a death takes a cell out of the order until the next boundary.

    A cell that turns back, its transition abandoned, is as good as returning.
    """
    roles = view.role_by_cell
    num_leaving = sum(role is CellRole.LEAVING for role in roles)
    assert num_leaving <= 1 + world.had_loss, "two leave at once, and none is a restarted core"
    serving = sum(
        one.slots
        for one in view.engines
        if one.state not in UP and (one.cell is None or roles[one.cell] is CellRole.ROLLOUT)
    )
    assert view.capacity in (serving, serving - shape.config.engines[0].slots)
    assert world.had_loss or view.capacity == serving
    is_turning = any(one.is_abandoned for one in scheduler._run.transitions.values())
    if view.phase is not Phase.RUNNING or any(view.is_returning_by_cell) or is_turning:
        return
    away = [role in AWAY for cell, role in enumerate(roles) if cell not in world.died_in_burst]
    assert away == sorted(away, reverse=True), "the training set is no prefix"
    if any(away) and not world.had_loss:
        assert view.capacity >= view.waterlevel, "C_R < w with a cell away"


def _check_answers(scheduler: Scheduler, world: World) -> None:
    """Whatever the scheduler waits for is on its way in the world."""
    under_way = {one.command_id for one in world.loose}
    under_way.update(world.launches.values())
    for machine in world.machines.values():
        under_way.update(one.command_id for one in machine.line)
    for command in scheduler._run.outbox.pending():
        is_end = isinstance(command, c.EndRun)
        assert is_end or command.command_id in under_way, f"nobody will answer {command}"


def _check_slots(view: SchedulerView) -> None:
    """Rule 6: nothing waits in the queue beside a free slot of an open engine."""
    if view.phase in NO_SLOTS or view.num_displaced > 0 or view.num_queued == 0:
        return
    free = [one.slots - one.num_used for one in view.engines if one.state is EngineState.OPEN]
    assert sum(free) == 0, "a free slot beside a queue"


def _check_indexes(run: RunState) -> None:
    """What states are not compared by says the same as a walk over what they are compared by."""
    topology = run.topology
    engines, cells = topology.engines.values(), topology.cells
    for state, found in topology.engines_by_state.items():
        assert set(found) == {one.engine for one in engines if one.state is state}
    for role, those in topology.cells_by_role.items():
        assert set(those) == {one.cell for one in cells if one.role is role}
    assert set(topology.must_return) == {one.cell for one in cells if one.must_return}
    assert topology.capacity == sum(one.slots for one in engines if one.is_serving)
    is_open = [one for one in engines if one.state is EngineState.OPEN]
    assert topology.num_free_open == sum(one.num_free for one in is_open)
    for one in is_open:
        entry = (-one.num_free, one.stay, one.engine)
        assert one.num_free == 0 or entry in topology._free
    timeout_s = run.config.publish_timeout_s
    for one in topology.engines_by_state[EngineState.PUBLISHING].values():
        assert (one.due_since_s + timeout_s, one.number, one.engine) in run.publish_deadlines
    for one in topology.engines_by_state[EngineState.QUARANTINED].values():
        assert (one.due_since_s + 2 * timeout_s, one.number, one.engine) in run.publish_deadlines
    for state, members in ({} if run.step is None else run.step.members_by_state).items():
        assert run.step is not None
        assert set(members) == {k for k, one in run.step.members.items() if one.state is state}


def _check_end(view: SchedulerView, world: World, end: c.EndRun) -> None:
    """P1: at the end nothing is unfinished, but for what did not close after its cancel."""
    assert view.phase is Phase.ENDED
    assert end.failed or view.waterlevel == 0
    assert end.failed or view.num_assigned == 0
