"""Shows a run while it goes on, and tells its result when it is over.

Owns: filling the views' state from the scheduler and the shell's counters. Must not know: how a
terminal is drawn, or a rule of scheduling.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from opengyre.control.cells import CellRole, EngineState
from opengyre.control.view import EngineView, SchedulerView
from opengyre.runtime.run import Run, RunEnd
from opengyre.store.journal import read_journal
from opengyre.store.observations import Role
from opengyre.store.run_folder import open_run_folder
from opengyre.views.fold import Fold
from opengyre.views.report import draw_report
from opengyre.views.run_state import RunState
from opengyre.views.summary import summarise
from opengyre.views.terminal import EngineLane, TerminalView, ViewState
from opengyre.views.words import step_words

SHOW_EVERY_S = 0.5
RATE_WINDOW = 20
ROLES = {
    CellRole.ABSENT: Role.LOST,
    CellRole.ROLLOUT: Role.ROLLOUT,
    CellRole.LEAVING: Role.LEAVING,
    CellRole.TRAINING: Role.TRAINING,
    CellRole.RETURNING: Role.RETURNING,
}


def watcher(is_quiet: bool) -> Callable[[Run], Coroutine[Any, Any, None]]:
    """What `Run.drive` runs beside the run: a terminal view, or nothing."""

    async def watch(run: Run) -> None:
        if is_quiet:
            await _look(run, None)
        with TerminalView() as view:
            await _look(run, view)

    return watch


def finish(ended: RunEnd, *, as_json: bool) -> None:
    """Write summary.json and report.png from the journal, and tell the result."""
    folder = open_run_folder(ended.folder)
    summary = summarise(fold_run(folder.db))
    folder.write_summary(summary)
    draw_report(fold_run(folder.db), folder.report_png)
    if as_json:
        Console().print_json(json.dumps(summary))
        return
    TerminalView().print_final(
        summary, folder=_short(folder.path), report=_short(folder.report_png)
    )


def fold_run(db: Path) -> RunState:
    """Everything the journal says."""
    fold = Fold()
    for row in read_journal(db):
        fold.apply(row)
    return fold.state


async def _look(run: Run, view: TerminalView | None) -> None:
    """Until cancelled: show the state and tell notes."""
    rate = _Rate()
    while True:
        notes, run.notes = run.notes, []
        if view is not None:
            view.show(view_state(run, rate))
            for now_s, words in notes:
                view.note(now_s, words)
        await asyncio.sleep(SHOW_EVERY_S)


class _Rate:
    """Sampled tokens per second over the last `RATE_WINDOW` looks."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def per_s(self, wall_s: float, num_tokens: int) -> float:
        self._seen = [*self._seen[-RATE_WINDOW:], (wall_s, num_tokens)]
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def view_state(run: Run, rate: _Rate) -> ViewState:
    """What the scheduler and the shell know now."""
    seen = run.scheduler.snapshot()
    wall_s = run.opened.clock.now_s()
    last = run.last_step
    return ViewState(
        wall_s=wall_s,
        phase=seen.phase.value,
        burst=seen.burst,
        step=seen.steps_done,
        num_steps=run.opened.config.run.num_steps,
        policy_version=seen.version,
        waterlevel=seen.waterlevel,
        capacity=seen.capacity,
        next_threshold=seen.threshold,
        num_ready=seen.num_ready,
        num_needed=seen.need,
        groups_per_step=run.opened.config.schedule.groups_per_step,
        last_reward=None if last is None else last.mean_reward,
        last_step="" if last is None else step_words(last),
        last_eval=run.results.last_eval,
        tokens_per_s=rate.per_s(wall_s, run.told.num_sampled_tokens),
        num_continued=run.told.num_continued,
        engines=tuple(_lane(seen, engine) for engine in seen.engines),
        waiting_for=(*run.gateways.lives.waits(), *seen.waiting_for),
    )


def _lane(seen: SchedulerView, engine: EngineView) -> EngineLane:
    if engine.cell is None:
        role = Role.LOST if engine.state is EngineState.ABSENT else Role.ROLLOUT
    else:
        role = ROLES[seen.role_by_cell[engine.cell]]
    return EngineLane(
        engine=engine.engine,
        cell=engine.cell,
        role=role,
        num_running=engine.num_used,
        slots=engine.slots,
        version=engine.verified_version or 0,
    )


def _short(path: Path) -> str:
    """Relative to where the user stands, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
