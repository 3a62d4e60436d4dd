"""A frozen picture of the scheduler, for the terminal and for tests.

Owns: SchedulerView and how it is taken. Must not know: who looks.
Invariant: taking one changes nothing.
"""

from dataclasses import dataclass

from opengyre.control import moves, waiting
from opengyre.control.bursts import Phase
from opengyre.control.cells import CellRole, EngineState
from opengyre.control.facts import Outcome
from opengyre.control.groups import GroupState
from opengyre.control.ids import EngineId
from opengyre.control.run_state import RunState
from opengyre.control.step_record import StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    engine: EngineId
    cell: int | None
    state: EngineState
    slots: int
    num_used: int
    verified_version: int | None
    due_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """`threshold` is the highest w at which `next_cell` (under colocate: all that go together) may
    leave: C_R - C_e. A cell that is
    returning may still be on its way into training. `steps_done` and
    the counts are of the whole run; `step` counts from 1."""

    phase: Phase
    burst: int
    step_in_burst: int
    steps_per_burst: int
    steps_done: int
    version: int
    published_version: int
    dispatched: int
    launched: int
    finished: int
    waterlevel: int
    capacity: int
    next_cell: int | None
    threshold: int | None
    role_by_cell: tuple[CellRole, ...]
    is_returning_by_cell: tuple[bool, ...]
    engines: tuple[EngineView, ...]
    num_queued: int
    num_displaced: int
    step: int | None
    step_state: StepState | None
    need: int
    num_assigned: int
    num_ready: int
    num_live: int
    num_void: int
    num_filtered: int
    num_consumed: int
    num_dropped: int
    num_short_steps: int
    num_empty_steps: int
    num_by_outcome: tuple[tuple[Outcome, int], ...]
    refused: tuple[tuple[str, int], ...]
    waiting_for: tuple[str, ...]


def take_view(run: RunState) -> SchedulerView:
    following = moves.next_cells(run)
    leaving = sum(run.engine_of(cell).slots for cell in following)
    groups, step = run.groups.num_by_state, run.step
    return SchedulerView(
        phase=run.burst.phase,
        burst=run.burst.number,
        step_in_burst=run.burst.num_done + (step is not None),
        steps_per_burst=run.burst.num_steps,
        steps_done=run.steps_done,
        version=run.version,
        published_version=run.published_version,
        dispatched=run.counts.dispatched,
        launched=run.counts.launched,
        finished=run.counts.finished,
        waterlevel=run.waterlevel,
        capacity=run.capacity,
        next_cell=following[0].cell if following else None,
        threshold=run.capacity - leaving if following else None,
        role_by_cell=tuple(cell.role for cell in run.cells),
        is_returning_by_cell=tuple(
            cell.must_return or cell.role is CellRole.RETURNING for cell in run.cells
        ),
        engines=_engines(run),
        num_queued=len(run.executions.queue),
        num_displaced=len(run.executions.displaced),
        step=None if step is None else step.step,
        step_state=None if step is None else step.state,
        need=run.need,
        num_assigned=run.num_assigned,
        num_ready=run.groups.num_ready,
        num_live=run.groups.num_live,
        num_void=groups[GroupState.VOID],
        num_filtered=groups[GroupState.FILTERED],
        num_consumed=groups[GroupState.CONSUMED],
        num_dropped=groups[GroupState.DROPPED],
        num_short_steps=run.num_short_steps,
        num_empty_steps=run.num_empty_steps,
        num_by_outcome=tuple(run.num_by_outcome.items()),
        refused=tuple(sorted(run.refused.items())),
        waiting_for=waiting.words(run),
    )


def _engines(run: RunState) -> tuple[EngineView, ...]:
    return tuple(
        EngineView(
            engine=one.engine,
            cell=one.cell,
            state=one.state,
            slots=one.slots,
            num_used=len(one.live),
            verified_version=one.verified_version,
            due_version=one.due_version,
        )
        for one in run.engines.values()
    )
