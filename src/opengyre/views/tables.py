"""Plain-text tables for `gyre run show` and `gyre run inspect`.

Owns: rows and columns. Must not know: terminals.
"""

from collections.abc import Sequence
from typing import Any

from opengyre.seams.records import TurnRecord
from opengyre.store.observations import StepReport
from opengyre.views.run_state import ExecutionView, RunState
from opengyre.views.words import tree_gain


def execution_fields(one: ExecutionView) -> dict[str, Any]:
    """One execution, for JSON and for its headline."""
    return {
        "execution": one.execution,
        "group": one.group,
        "task": one.task,
        "burst": one.burst,
        "version": one.version,
        "engine": one.engine,
        "dispatched_s": one.dispatched_s,
        "launched_s": one.launched_s,
        "closed_s": one.closed_s,
        "outcome": None if one.outcome is None else one.outcome.value,
        "reward": one.reward,
        "shaped": one.value,
        "exclusion": one.exclusion,
        "verdict": one.verdict_reason,
        "launches": one.num_launches,
    }


def turn_cells(turn: TurnRecord) -> dict[str, Any]:
    """One line of the table of turns."""
    sampled = " ".join(
        f"{span.end - span.start}@{span.engine}/v{span.policy_version}" for span in turn.spans
    )
    return {
        "turn": turn.turn.partition(".")[2],
        "attempt": turn.attempt,
        "parent": turn.parent.partition(".")[2] or "-",
        "role": turn.role,
        "kept": turn.num_kept_tokens,
        "new": turn.num_new_prompt_tokens,
        "sampled": sampled or "-",
        "calls": turn.num_calls,
        "malformed": turn.num_malformed_calls,
        "watched": turn.num_watched_calls,
        "finish": turn.finish if turn.is_committed else f"{turn.finish} (not committed)",
        "took s": round(turn.ended_s - turn.received_s, 3),
        "held s": round(turn.held_s, 3),
        "fork": turn.fork_reason or "-",
    }


def step_cells(state: RunState) -> list[dict[str, Any]]:
    """One line a step. `equal`: groups whose rewards did not differ; `clipped`: tokens that the
    objective bounded; `tests`: share of the best executions that touched them; `tree` and `fill` as
    in `words.step_words`; `reduced`: alone, group or star, and after how many tries."""
    return [_step_cells(step) for step in state.steps]


def _step_cells(step: StepReport) -> dict[str, Any]:
    return {
        "step": step.step,
        "version": step.version_after,
        "groups": len(step.groups),
        "equal": step.num_no_variance,
        "tokens": step.num_tokens,
        "clipped": step.num_clipped,
        "masked": sum(sum(one.masked.values()) for one in step.members),
        "dropped": sum(sum(one.dropped.values()) for one in step.members),
        "loss": _rounded(step.loss, 4),
        "grad norm": _rounded(step.grad_norm, 4),
        "reward": _rounded(step.mean_reward, 3),
        "shaped": _rounded(step.mean_shaped, 3),
        "tests": _rounded(step.watched_share, 2),
        "tree": _rounded(tree_gain(step), 2),
        "fill": _rounded(step.fill, 2),
        "reduced": _reduced(step),
        "reduce s": _rounded(step.reduce_s, 2),
        "short": "yes" if step.is_short else "",
        "took s": round(step.closed_s - step.opened_s, 2),
    }


def _reduced(step: StepReport) -> str:
    is_first = step.num_reduce_tries == 1
    return step.reduced_by if is_first else f"{step.reduced_by}, try {step.num_reduce_tries}"


def work_cells(state: RunState) -> list[dict[str, Any]]:
    """One line for each cell of each step: its micro-steps, and the seconds of its pipeline stages,
    first stage first. `returned`: went back to the stream when the cell was dropped."""
    return [_work_cells(step, cell) for step in state.steps for cell in step.cells]


def _work_cells(step: StepReport, cell: str) -> dict[str, Any]:
    work, stages = step.cells[cell], step.stages.get(cell, [])
    return {
        "step": step.step,
        "cell": cell,
        "claimed": work.num_claimed,
        "done": work.num_done,
        "tokens": work.num_tokens,
        "returned": work.num_returned,
        "refused": work.num_refused,
        "forward s": _by_stage([one.forward_s for one in stages]),
        "backward s": _by_stage([one.backward_s for one in stages]),
        "bubble s": _by_stage([one.bubble_s for one in stages]),
        "waiting s": _by_stage([one.waiting_s for one in stages]),
    }


def _by_stage(seconds: Sequence[float]) -> str:
    return " ".join(f"{one:.2f}" for one in seconds) or "-"


def _rounded(value: float | None, places: int) -> float | None:
    return None if value is None else round(value, places)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Aligned text: numbers to the right, the rest to the left; the first line names columns."""
    if not rows:
        return []
    names = list(rows[0])
    cells = [["-" if row[name] is None else str(row[name]) for name in names] for row in rows]
    widths = [max(len(line[n]) for line in [names, *cells]) for n in range(len(names))]
    is_number = [all(isinstance(row[name], int | float | None) for row in rows) for name in names]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in [names, *cells]
    ]
