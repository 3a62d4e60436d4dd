"""What a run tells of itself beside facts: its first row, harness errors, evaluations.

Must not know: how these are shown.
"""

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version

from opengyre.control.config import SchedulerConfig
from opengyre.runtime.book import Book, Execution
from opengyre.runtime.prepare import Prepared
from opengyre.seams.harness import Ending, LaunchResult
from opengyre.store.observations import (
    AnyObservation,
    EngineSlots,
    EvalResult,
    HarnessError,
    LaunchRecorded,
    RunStarted,
)


def run_started(prepared: Prepared) -> RunStarted:
    """The row a replay starts from."""
    config: SchedulerConfig = prepared.scheduler
    return RunStarted(
        version=version("opengyre"),
        seed=prepared.config.run.seed,
        engines=[
            EngineSlots(engine=spec.engine, cell=spec.cell, slots=spec.slots)
            for spec in config.engines
        ],
        num_steps=config.num_steps,
        steps_per_burst=config.steps_per_burst,
        groups_per_step=config.groups_per_step,
        executions_per_group=config.group_size,
        min_valid_members=config.min_valid_members,
        supply_fraction=config.supply_fraction,
        scheduler=asdict(config),
    )


class Results:
    """Collects how executions ended; an evaluation is told when its last member has a verdict."""

    def __init__(self, book: Book, observe: Callable[[AnyObservation], None]) -> None:
        self._book = book
        self._observe = observe
        self.last_eval: float | None = None

    def tell_launch(self, one: Execution) -> None:
        """A launch begins; the number says which of the execution it is."""
        self._observe(
            LaunchRecorded(
                execution=one.execution,
                task=one.task.name,
                group=one.group,
                launch_number=one.num_launches,
            )
        )

    def tell_end(self, one: Execution, result: LaunchResult) -> None:
        """A failed harness is told; it is our error if a call that we cut could not go on."""
        if result.ending is Ending.EXITED and result.exit_code == 0:
            return
        if result.ending in (Ending.TIMED_OUT, Ending.CANCELLED):
            return
        was_cut = any(turn.num_continuations and turn.finish == "error" for turn in one.turns)
        kind = f"{result.ending.value} {result.exit_code}: {result.reason}"
        self._observe(HarnessError(execution=one.execution, kind=kind, during_move=was_cut))

    def tell_verdict(self, one: Execution) -> None:
        """The last verdict of an evaluation closes it."""
        if one.group is not None:
            return
        members = self._book.evals[one.burst]
        if not all(member.has_verdict for member in members):
            return
        valid = [member.reward for member in members if member.reward is not None]
        self.last_eval = sum(valid) / len(valid) if valid else None
        self._observe(
            EvalResult(
                burst=one.burst,
                version=one.version,
                rewards=[member.reward for member in members],
                later_token_share=_later_share(members),
            )
        )


def _later_share(members: list[Execution]) -> float:
    """Share of an evaluation's tokens that were sampled under a later version than its own."""
    sampled = later = 0
    for member in members:
        for turn in member.turns:
            for span in turn.spans:
                sampled += span.end - span.start
                later += (span.end - span.start) * (span.policy_version > member.version)
    return later / sampled if sampled else 0.0
