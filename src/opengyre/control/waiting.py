"""What the run waits for, in full words with numbers, and when it must look again.

Owns: the words and the wake-up time. Must not know: how either is used.
Invariant: the order of the words is fixed; reading changes nothing.
"""

from collections.abc import Iterable, Iterator

from opengyre.control import publication
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.run_state import RunState
from opengyre.control.step_record import MemberState, StepRecord, StepState
from opengyre.control.transition import LeavingStage

NUM_NAMED = 4


def words(run: RunState) -> tuple[str, ...]:
    if run.burst.phase is Phase.ENDED:
        return ()
    return (*_of_run(run), *_of_step(run), *_of_cells(run), *_of_executions(run))


def _of_run(run: RunState) -> Iterator[str]:
    phase = run.burst.phase
    if phase is Phase.STARTING:
        late = run.topology.engines_by_state[EngineState.ABSENT]
        yield f"start waits for {_few(late)}"
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
        if not run.config.is_streaming and not step.assigned:
            yield f"step {step.step} starts when all {run.need} groups are ready"
    joining = step.members_by_state[MemberState.ADMITTING]
    if joining:
        yield f"step {step.step} waits for {_few(run.cells[one].name for one in joining)} to join"


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
    by_role, by_state = run.topology.cells_by_role, run.topology.engines_by_state
    if run.burst.phase is Phase.RUNNING and run.outbox.is_pending(run.checkpoint):
        yield f"core waits for the checkpoint of version {run.version} before it returns"
    if run.outbox.is_pending(run.abandon):
        yield "the stream was told to abandon its step and has not answered"
    returning = by_role[CellRole.RETURNING]
    if returning:
        yield f"{_few_are(cell.name for cell in returning.values())} returning to rollout"
    dead = by_role[CellRole.ABSENT]
    if dead and run.burst.phase is not Phase.STARTING:
        yield f"{_few_are(cell.name for cell in dead.values())} dead and not started again yet"
    late = by_state[EngineState.QUARANTINED]
    if late:
        version = run.published_version
        yield f"{_few_are(late)} quarantined: version {version} is not verified"
    for stage in LeavingStage:
        cells = [run.cells[one.cell] for one in run.transitions.values() if one.stage is stage]
        if cells:
            yield f"{_few_are(cell.name for cell in cells)} leaving rollout: {stage.value}"
    if not run.transitions and run.why_stays is not None:
        yield run.why_stays


def _few(names: Iterable[str]) -> str:
    """At most a few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - NUM_NAMED} more" if len(listed) > NUM_NAMED else ""
    return f"{', '.join(listed[:NUM_NAMED])}{more}"


def _few_are(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{_few(listed)} {'is' if len(listed) == 1 else 'are'}"


def _of_executions(run: RunState) -> Iterator[str]:
    book = run.executions
    if book.displaced:
        yield f"{len(book.displaced)} displaced executions wait for a slot"
    if book.queue:
        yield f"{len(book.queue)} executions wait in the queue for a slot"
    if run.short_since_s is not None and run.topology.cells_by_role[CellRole.TRAINING]:
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
    member = None if run.step is None else run.step.next_to_join
    if member is not None:
        yield member.deadline_s


def _times_of_engines(run: RunState) -> Iterator[float]:
    if run.stuck_since_s is not None:
        yield run.stuck_since_s + run.config.lost_deadline_s
    deadline_s = publication.next_deadline_s(run)
    if deadline_s is not None:
        yield deadline_s
