"""From the last commit of a burst to the first moment of the next (rules 3 and 9).

Owns: the order of a burst's end, retention, dispatch. Must not know: how cells return or
versions load.
Invariants: durable before exposed, exposed before published, published before dispatch; dispatch
happens here and nowhere else.
"""

from opengyre.control import moves, publication, steps
from opengyre.control.bursts import Phase
from opengyre.control.cells import Cell, CellRole
from opengyre.control.commands import Checkpoint, DispatchEval, DispatchGroups, Expose
from opengyre.control.members import cancel_all
from opengyre.control.run_state import RunState
from opengyre.control.topology import OUT_OF_SERVICE


def advance(run: RunState, now_s: float) -> None:
    phase = run.burst.phase
    if phase is Phase.STARTING and _is_up(run):
        run.burst.move(Phase.EXPOSING)
    elif phase is Phase.RUNNING and _is_over(run):
        _end_burst(run)
    if run.burst.phase is Phase.CHECKPOINTING:
        _checkpoint(run)
    if run.burst.phase is Phase.EXPOSING:
        _expose(run)
    if run.burst.phase is Phase.EXPOSING and run.is_exposed:
        _pass_boundary(run, now_s)


def checkpointed(run: RunState) -> None:
    """The state after the last committed step survives; a recalled core may go."""
    run.durable_version = run.version
    for committed in run.undurable:
        for group in committed.groups:
            run.groups.forget(group)
    run.undurable.clear()
    if run.burst.phase is Phase.RUNNING:
        run.topology.set_must_return(run.core, is_asked=True)
    elif run.burst.phase is Phase.CHECKPOINTING:
        run.burst.move(Phase.EXPOSING)


def num_to_dispatch(run: RunState) -> int:
    """Rule 3: never more than the run-ahead bound or than the remaining steps can consume."""
    return max(0, run.config.most_outstanding(run.steps_left) - run.groups.num_outstanding)


def _is_up(run: RunState) -> bool:
    has_all = all(engine.has_reported for engine in run.engines.values())
    return has_all and run.core.role is CellRole.ROLLOUT


def _is_over(run: RunState) -> bool:
    if run.step is not None or run.outbox.is_pending(run.checkpoint):
        return False
    return run.burst.num_left == 0 or run.groups.num_outstanding == 0


def _end_burst(run: RunState) -> None:
    """The last step has closed, or nothing is left to train in this burst."""
    num_skipped = run.burst.num_left
    run.burst.num_skipped += num_skipped
    run.burst.num_done += num_skipped
    run.steps_done += num_skipped
    run.num_empty_steps += num_skipped
    moves.abandon(run)
    run.burst.move(Phase.CHECKPOINTING if run.undurable else Phase.EXPOSING)


def _checkpoint(run: RunState) -> None:
    if run.core.role is not CellRole.TRAINING or run.outbox.is_pending(run.checkpoint):
        return
    out, last = run.outbox, run.undurable[-1].step
    reason = f"burst {run.burst.number} ends with step {last}"
    run.checkpoint = out.add(
        Checkpoint(command_id=out.new_id(), reason=reason, step=last, version=run.version)
    )


def _expose(run: RunState) -> None:
    is_able = run.core.role in (CellRole.TRAINING, CellRole.ROLLOUT)
    if run.is_exposed or not is_able or run.outbox.is_pending(run.expose):
        return
    out = run.outbox
    reason = f"version {run.version} survives a crash and may be published"
    run.expose = out.add(Expose(command_id=out.new_id(), reason=reason, version=run.version))


def _pass_boundary(run: RunState, now_s: float) -> None:
    run.is_exposed = False
    run.published_version = run.version
    run.topology.set_wanted(run.core, is_wanted=False)
    run.topology.unsettle_all()
    for cell in run.cells:
        run.topology.set_order(cell, in_order=cell.role is not CellRole.ABSENT)
    is_final = run.steps_left == 0
    steps.drop_overdue(run)
    num_groups = num_to_dispatch(run)
    num_eval = _num_eval(run, is_final=is_final)
    retained = () if is_final else _retained(run, num_groups, num_eval)
    for cell in run.cells:
        is_away = cell.role in (CellRole.TRAINING, CellRole.LEAVING)
        transition = run.transitions.get(cell.cell)
        is_turning = transition is not None and transition.is_abandoned
        is_staying = cell in retained or is_turning or cell.is_fixed
        run.topology.set_must_return(cell, is_asked=is_away and not is_staying)
    moves.return_cells(run)
    publication.reconcile(run, now_s)
    _begin_burst(run, is_final=is_final, num_eval=num_eval)
    _dispatch(run, now_s, num_groups=num_groups, num_eval=num_eval)


def _begin_burst(run: RunState, *, is_final: bool, num_eval: int) -> None:
    burst = run.burst
    burst.number += 1
    burst.num_steps = min(run.config.steps_per_burst, run.steps_left)
    burst.num_done = burst.num_skipped = 0
    run.num_core_losses = 0
    run.is_dirty = True
    if not is_final:
        burst.move(Phase.RUNNING)
        return
    burst.move(Phase.FINAL_EVAL)
    cancel_all(run, f"all {run.config.num_steps} steps are done")


def _num_eval(run: RunState, *, is_final: bool) -> int:
    config, number = run.config, run.burst.number
    if is_final:
        is_due = config.eval_at_end
    elif number == 0:
        is_due = config.eval_at_start
    else:
        is_due = config.eval_every_bursts > 0 and number % config.eval_every_bursts == 0
    return config.num_eval_executions if is_due else 0


def _retained(run: RunState, num_groups: int, num_eval: int) -> tuple[Cell, ...]:
    """Rule 9: enough is ready now, and the others have the slots for all that is coming."""
    cells = run.policy.retainable(run.topology)
    num_steps = min(run.config.steps_per_burst, run.steps_left)
    if not cells or not moves.is_supplied(run, num_steps=num_steps, num_coming=num_groups):
        return ()
    staying = {cell.engine for cell in cells}
    slots = sum(
        engine.slots
        for engine in run.engines.values()
        if engine.engine not in staying and engine.state not in OUT_OF_SERVICE
    )
    num_coming = num_groups * run.config.group_size + num_eval
    return cells if slots >= run.waterlevel + num_coming else ()


def _dispatch(run: RunState, now_s: float, *, num_groups: int, num_eval: int) -> None:
    """Evaluation first: it is measured under the version it was dispatched at."""
    out, book, version = run.outbox, run.executions, run.version
    if num_eval > 0:
        deadline_s = now_s + run.config.eval_deadline_s
        wave = book.dispatch_wave(num_executions=num_eval, version=version, deadline_s=deadline_s)
        out.add(
            DispatchEval(
                command_id=out.new_id(),
                reason=f"evaluation of version {version}",
                executions=tuple(wave.open),
                version=version,
                burst=run.burst.number,
            )
        )
    if num_groups > 0:
        new = [
            book.dispatch_group(num_members=run.config.group_size, version=version)
            for _ in range(num_groups)
        ]
        for group in new:
            run.groups.add(group)
        out.add(
            DispatchGroups(
                command_id=out.new_id(),
                reason=f"{run.groups.num_outstanding} outstanding, {run.steps_left} steps left",
                groups=tuple((group.group, group.members) for group in new),
                version=version,
                burst=run.burst.number,
            )
        )
    run.counts.add_dispatched(num_eval + num_groups * run.config.group_size)
