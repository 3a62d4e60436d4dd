"""P8 from the journal: each micro-step of an accepted step contributes exactly once.

Must not know: streams, leases, cells' processes. Invariant: a step that is opened again starts
from nothing; what was told of it before no longer counts.
"""

from collections import Counter
from dataclasses import dataclass, field

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.groups import GroupState
from opengyre.store import observations as seen
from opengyre.store.journal import Row
from opengyre.views.findings import CheckResult, Findings
from opengyre.views.run_state import RunState


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What was told of one step since it was last opened."""

    done: list[seen.MicroStepDone] = field(default_factory=list)
    report: seen.StepReport | None = None
    is_open: bool = False
    is_committed: bool = False

    def give_back(self, number: int, cell: int) -> None:
        self.done = [one for one in self.done if (one.number, one.cell) != (number, cell)]


class ExactlyOnce:
    """P8."""

    def __init__(self) -> None:
        self.steps: dict[int, StepRecord] = {}
        self._findings = Findings(
            promise="P8",
            words="each micro-step of an accepted step contributes exactly once",
            unit="micro-steps",
        )

    def see(self, row: Row, state: RunState) -> None:
        match row.value:
            case c.Plan():
                for command in row.value.commands:
                    self._see_command(command)
            case seen.MicroStepDone():
                self._step(row.value.step).done.append(row.value)
            case seen.MicroStepReturned():
                self._step(row.value.step).give_back(row.value.number, row.value.cell)
            case seen.StepReport():
                self._step(row.value.step).report = row.value
            case f.StepCommitted():
                step = self._step(row.value.step)
                step.is_committed = step.is_committed or step.is_open
            case _:
                return

    def accepted(self) -> list[seen.MicroStepDone]:
        """Micro-steps of accepted steps, in step order; call after the last row."""
        return [
            one
            for _, step in sorted(self.steps.items())
            if step.is_committed and step.report is not None and step.report.is_applied
            for one in step.done
        ]

    def reports(self) -> list[seen.StepReport]:
        """What was told of accepted steps, in step order; call after the last row."""
        return [
            step.report
            for _, step in sorted(self.steps.items())
            if step.is_committed and step.report is not None
        ]

    def finish(self, state: RunState) -> CheckResult:
        for number, step in sorted(self.steps.items()):
            if step.is_committed:
                self._check(number, step)
        self._check_groups(state)
        self._check_paths()
        return self._findings.result()

    def _see_command(self, command: c.AnyCommand) -> None:
        """A dropped member's work goes back when that is told: after the reduce none does."""
        if isinstance(command, c.OpenStep | c.AbandonStep):
            is_open = isinstance(command, c.OpenStep)
            self.steps[command.step] = StepRecord(is_open=is_open)

    def _step(self, step: int) -> StepRecord:
        return self.steps.setdefault(step, StepRecord())

    def _check(self, number: int, step: StepRecord) -> None:
        if step.report is None:
            self._findings.broken(f"step {number} was committed without a report")
            return
        told = Counter(one.number for one in step.done)
        summed = Counter(step.report.micro_steps)
        for micro_step in sorted(told | summed):
            times, counted = told[micro_step], summed[micro_step]
            words = f"done {times} and summed {counted} times"
            is_once = times == 1 and counted == 1
            self._findings.expect(is_once, f"step {number}, micro-step {micro_step}: {words}")
        strangers = {group for one in step.done for group in one.groups} - set(step.report.groups)
        if strangers:
            self._findings.broken(
                f"step {number} trained {min(strangers)}, which it did not consume"
            )

    def _check_groups(self, state: RunState) -> None:
        for one in state.groups.values():
            ended = state.ended_state(one)
            if one.assigned_step is not None and ended is not GroupState.READY:
                words = f"step {one.assigned_step} took {one.group} though it is {ended.value}"
                self._findings.broken(words)
        reports = [one.report for one in self.steps.values() if one.is_committed and one.report]
        consumed = Counter(group for report in reports for group in report.groups)
        for group, times in sorted(consumed.items()):
            if times > 1:
                self._findings.broken(f"{group} was consumed {times} times")

    def _check_paths(self) -> None:
        paths = Counter(
            (path.execution, path.ids_crc32, tuple(path.trained), path.logprobs_crc32)
            for one in self.accepted()
            for path in one.paths
            if path.num_tokens
        )
        for (execution, *_), times in sorted(paths.items()):
            if times > 1:
                self._findings.broken(f"a path of {execution} was trained {times} times")
