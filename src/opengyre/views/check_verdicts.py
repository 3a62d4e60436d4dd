"""P12: no verdict is not zero.

Must not know: graders, advantages. Invariants: an execution without a verdict has no reward, no
advantage and no trained token, in journal, tables and accounts; a reward comes from a grader's
word, or is the placeholder that the config names.
"""

import math
from collections.abc import Mapping
from statistics import fmean

from opengyre.control.facts import Outcome
from opengyre.store import observations as seen
from opengyre.views.consumed import Consumed
from opengyre.views.findings import CheckResult, Findings
from opengyre.views.run_state import ExecutionView, RunState

UNGRADED = (Outcome.CANCELLED, Outcome.LOST)
PLACEHOLDER = "grading.placeholder_reward"
MEAN_TOLERANCE = 1e-9


class VerdictChecks:
    """P12; call `check` once. `recorded`: rewards of the executions table where there is one."""

    def __init__(self, recorded: Mapping[str, float | None] | None = None) -> None:
        self._recorded = recorded
        self._findings = Findings(promise="P12", words="no verdict is not zero", unit="executions")

    def check(self, state: RunState, consumed: Consumed) -> CheckResult:
        num_placeholders = 0
        for one in state.executions.values():
            if one.has_last_word or one.reward is not None:
                problem = self._problem(one, consumed.account(one.execution))
                self._findings.expect(not problem, f"{one.execution} {problem}")
            num_placeholders += one.reward is not None and _is_placeholder(one)
        for report in state.steps:
            self._check_mean(report, state)
        for _, result in state.evals:
            self._check_evaluation(result, state)
        if num_placeholders:
            self._findings.notes.append(f"{num_placeholders} rewards are {PLACEHOLDER}")
        return self._findings.result()

    def _problem(self, one: ExecutionView, told: seen.MemberAccount | None) -> str:
        if self._recorded is not None and self._recorded.get(one.execution) != one.reward:
            table = self._recorded.get(one.execution)
            return f"has reward {table} in the executions table, {one.reward} in the journal"
        if one.reward is not None and one.outcome in UNGRADED and not _is_placeholder(one):
            return f"was {one.outcome.value} and has reward {one.reward}, though nothing was graded"
        return "" if told is None else _account_problem(one, told)

    def _check_mean(self, report: seen.StepReport, state: RunState) -> None:
        """A member without a verdict does not pull the mean down."""
        members = [m for g in report.groups if g in state.groups for m in state.groups[g].members]
        rewards = [state.executions[member].reward for member in members]
        valid = [reward for reward in rewards if reward is not None]
        mean = fmean(valid) if valid else None
        if not _is_close(mean, report.mean_reward):
            words = f"step {report.step} tells a mean reward of {report.mean_reward}"
            self._findings.broken(f"{words}, its {len(valid)} verdicts have {mean}")

    def _check_evaluation(self, result: seen.EvalResult, state: RunState) -> None:
        """A run that is cut may tell of an evaluation whose last verdicts were not told."""
        members = [
            one
            for one in state.executions.values()
            if one.group is None and one.burst == result.burst
        ]
        if len(members) != len(result.rewards):
            words = (
                f"the evaluation of version {result.version} tells {len(result.rewards)} rewards"
            )
            self._findings.broken(f"{words} of {len(members)} executions")
            return
        for one, told in zip(members, result.rewards, strict=True):
            if one.has_last_word and one.reward != told:
                words = f"{one.execution} has reward {told} in its evaluation"
                self._findings.broken(f"{words}, {one.reward} in the journal")


def _account_problem(one: ExecutionView, told: seen.MemberAccount) -> str:
    if told.reward != one.reward:
        return f"has reward {told.reward} in its account, {one.reward} in the journal"
    if told.shaped != one.value:
        return f"is compared by {told.shaped} in its account, by {one.value} in the journal"
    if one.value is not None:
        return "" if told.advantage is not None else "is valid and has no advantage"
    if told.advantage is not None or told.trained:
        words = one.exclusion or "no verdict"
        return f"has {words}, but advantage {told.advantage} and {told.trained} trained tokens"
    return ""


def _is_placeholder(one: ExecutionView) -> bool:
    return one.verdict_reason.startswith(PLACEHOLDER)


def _is_close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=MEAN_TOLERANCE, abs_tol=MEAN_TOLERANCE)
