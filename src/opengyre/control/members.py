"""Closing executions and giving groups their last words (rules 1 and 2).

Owns: what one closed execution changes. Must not know: steps, roles. Invariants: an execution
finishes once; a group's last word comes when its last member has closed and has a verdict.
"""

from opengyre.control.bursts import Phase
from opengyre.control.commands import Cancel
from opengyre.control.executions import Execution, ExecutionState
from opengyre.control.facts import Outcome
from opengyre.control.run_state import RunState
from opengyre.control.slots import release_slot


def close(run: RunState, execution: Execution, outcome: Outcome) -> None:
    """It holds no slot and is not in w any more; grading may still be under way."""
    if execution.state is ExecutionState.QUEUED:
        run.counts.add_launched()
    release_slot(run, execution)
    run.executions.close(execution)
    run.counts.add_finished()
    run.num_by_outcome[outcome] += 1
    if execution.has_last_word:
        _settle(run, execution)


def give_verdict(run: RunState, execution: Execution, *, value: float | None) -> None:
    execution.has_last_word, execution.value = True, value
    if execution.state is ExecutionState.CLOSED:
        _settle(run, execution)


def cancel(run: RunState, execution: Execution, reason: str) -> None:
    """Launched ones close by a fact; queued ones are launched and finished here at once."""
    if execution.is_cancelling:
        return
    execution.is_cancelling = True
    was_queued = execution.state is ExecutionState.QUEUED
    out = run.outbox
    out.add(
        Cancel(
            command_id=out.new_id(),
            reason=reason,
            execution=execution.execution,
            was_queued=was_queued,
        )
    )
    if was_queued:
        execution.has_last_word = True
        close(run, execution, Outcome.CANCELLED)
        run.is_dirty = True


def cancel_all(run: RunState, reason: str) -> None:
    for execution in tuple(run.executions.unfinished.values()):
        cancel(run, execution, reason)


def check_eval_deadlines(run: RunState, now_s: float) -> None:
    """Evaluation never holds up anything for longer than its deadline (rule 11)."""
    for wave in tuple(run.executions.waves):
        if wave.is_overdue or now_s < wave.deadline_s:
            continue
        wave.is_overdue = True
        for execution_id in tuple(wave.open):
            execution = run.executions.unfinished.get(execution_id)
            if execution is not None:
                cancel(run, execution, f"the evaluation of version {wave.version} is overdue")


def _settle(run: RunState, execution: Execution) -> None:
    """Groups that were dispatched for steps which did not need them end void after the last step:
    that is no sign of trouble."""
    run.executions.forget(execution)
    group = execution.group
    if group is None:
        return
    config = run.config
    run.groups.member_done(
        group,
        value=execution.value,
        min_valid=config.min_valid_members,
        is_filtering=config.filter_zero_variance,
    )
    num_void = run.groups.num_void_in_a_row
    is_surplus = run.burst.phase is Phase.FINAL_EVAL
    if num_void >= config.void_bound and run.failure is None and not is_surplus:
        run.failure = f"{num_void} groups in a row ended with too few valid members to train"
