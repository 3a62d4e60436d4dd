"""The end of a run: nothing unfinished, then EndRun (rule 12).

Owns: beginning the end, the final evaluation, the last command. Must not know: processes.
Invariants: everything unfinished is cancelled and gets an outcome; every wait has a deadline.
"""

from opengyre.control.bursts import Phase
from opengyre.control.commands import EndRun
from opengyre.control.members import cancel_all
from opengyre.control.recovery import abandon_step, tell_losses
from opengyre.control.run_state import Ending, RunState
from opengyre.control.step_record import StepState

OVER = (Phase.ENDING, Phase.ENDED)


def advance(run: RunState, now_s: float) -> None:
    phase = run.burst.phase
    if phase in OVER:
        _finish(run, now_s)
    elif run.failure is not None:
        _begin(run, now_s, run.failure, is_failed=True)
    elif run.stop_reason is not None:
        _begin(run, now_s, run.stop_reason, is_failed=False)
    elif phase is Phase.FINAL_EVAL and not _is_evaluating(run):
        _begin(run, now_s, f"all {run.config.num_steps} steps are done", is_failed=False)


def _is_evaluating(run: RunState) -> bool:
    """Waves wait for their last words until they are overdue."""
    return any(not wave.is_overdue for wave in run.executions.waves)


def _begin(run: RunState, now_s: float, reason: str, *, is_failed: bool) -> None:
    run.burst.move(Phase.ENDING)
    run.ending = Ending(
        is_failed=is_failed, reason=reason, deadline_s=now_s + run.config.cancel_deadline_s
    )
    run.transitions.clear()
    if run.step is not None and run.step.state is StepState.OPEN:
        abandon_step(run, reason)
        tell_losses(run)
    cancel_all(run, reason)
    _finish(run, now_s)


def _finish(run: RunState, now_s: float) -> None:
    ending = run.ending
    if ending is None or run.burst.phase is Phase.ENDED:
        return
    is_overdue = run.waterlevel > 0 and now_s >= ending.deadline_s
    if run.waterlevel > 0 and not is_overdue:
        return
    reason = ending.reason
    if is_overdue:
        reason = f"{reason}; {run.waterlevel} executions did not close after their cancel"
    run.burst.move(Phase.ENDED)
    out = run.outbox
    is_failed = ending.is_failed or is_overdue
    out.add(EndRun(command_id=out.new_id(), reason=reason, failed=is_failed))
