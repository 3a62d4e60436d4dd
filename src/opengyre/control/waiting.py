"""What the run waits for, in full words with numbers, and when it must look again.

Owns: the words and the wake-up time. Must not know: how either is used.
Invariant: the order of the words is fixed; reading changes nothing.
"""

from collections.abc import Iterator

from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.run_state import RunState
from opengyre.control.step_record import MemberState, StepRecord, StepState


def words(run: RunState) -> tuple[str, ...]:
    if run.burst.phase is Phase.ENDED:
        return ()
    return (*_of_run(run), *_of_step(run), *_of_cells(run), *_of_executions(run))


def _of_run(run: RunState) -> Iterator[str]:
    phase = run.burst.phase
    if phase is Phase.STARTING:
        late = [one.engine for one in run.engines.values() if one.state is EngineState.ABSENT]
        yield f"start waits for {', '.join(late)}"
    elif phase in (Phase.CHECKPOINTING, Phase.EXPOSING):
        yield f"boundary waits for {phase.value} version {run.version}"
    elif phase is Phase.FINAL_EVAL:
        num = sum(len(wave.open) for wave in run.executions.waves)
        yield f"final evaluation waits for {num} executions"
    elif phase is Phase.ENDING:
        yield f"end waits for {run.waterlevel} executions to close"


def _of_step(run: RunState) -> Iterator[str]:
    step = run.step
    if step is None:
        return
    if step.state is StepState.OPENING:
        yield f"step {step.step} waits for the core to open it"
    elif step.state is StepState.CLOSING:
        yield f"step {step.step} waits for its update over {len(step.assigned)} groups"
    else:
        yield (
            f"step {step.step} needs {run.need} more groups: "
            f"{run.groups.num_ready} ready, {run.groups.num_live} live"
        )
        yield from _blocked(run, step)
    for member in step.members.values():
        if member.state is MemberState.ADMITTING:
            yield f"step {step.step} waits for cell {member.cell} to join"


def _blocked(run: RunState, step: StepRecord) -> Iterator[str]:
    if step.blocked_by is None:
        return
    group = next(run.groups.live_of(step.blocked_by), None)
    if group is not None:
        yield (
            f"step {step.step} waits for {group.group} of version {group.version}: newer groups "
            f"would push it past staleness {run.config.staleness_bound}"
        )


def _of_cells(run: RunState) -> Iterator[str]:
    for cell in run.cells:
        if cell.role is CellRole.ROLLOUT:
            continue
        if cell.role is CellRole.RETURNING:
            yield f"{cell.name} is returning to rollout"
        elif cell.role is CellRole.ABSENT and run.burst.phase is not Phase.STARTING:
            yield f"{cell.name} is dead and not started again yet"
    for engine in run.engines.values():
        if engine.state is EngineState.QUARANTINED:
            yield f"{engine.engine} is quarantined: version {engine.due_version} is not verified"
    if run.transition is not None:
        cell = run.cells[run.transition.cell]
        yield f"{cell.name} is leaving rollout: {run.transition.stage.value}"
    elif run.why_stays is not None:
        yield run.why_stays


def _of_executions(run: RunState) -> Iterator[str]:
    book = run.executions
    if book.displaced:
        yield f"{len(book.displaced)} displaced executions wait for a slot"
    if book.queue:
        yield f"{len(book.queue)} executions wait in the queue for a slot"
    if run.short_since_s is not None and any(c.role is CellRole.TRAINING for c in run.cells):
        yield f"capacity {run.capacity} is below w = {run.waterlevel}: nothing more may leave"


def next_wakeup_s(run: RunState, now_s: float) -> float | None:
    """The first time after `now_s` at which a plan may change without a fact."""
    if run.burst.phase is Phase.ENDED:
        return None
    return min((time_s for time_s in _times(run) if time_s > now_s), default=None)


def _times(run: RunState) -> Iterator[float]:
    config = run.config
    yield from _times_of_engines(run)
    if run.burst.phase is Phase.RUNNING:
        yield run.not_before_s
        if run.supply.since_s is not None:
            yield run.supply.since_s + run.supply.hold_s
        if run.short_since_s is not None:
            yield run.short_since_s + config.recall_after_s
    if run.executions.displaced:
        yield run.reroute_not_before_s
    if run.ending is not None:
        yield run.ending.deadline_s
    for wave in run.executions.waves:
        yield wave.deadline_s
    for member in () if run.step is None else run.step.members.values():
        if member.state is MemberState.ADMITTING:
            yield member.deadline_s


def _times_of_engines(run: RunState) -> Iterator[float]:
    config = run.config
    if run.stuck_since_s is not None:
        yield run.stuck_since_s + config.lost_deadline_s
    for engine in run.engines.values():
        if engine.state is EngineState.PUBLISHING:
            yield engine.due_since_s + config.publish_timeout_s
        elif engine.state is EngineState.QUARANTINED:
            yield engine.due_since_s + 2 * config.publish_timeout_s
