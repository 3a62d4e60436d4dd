"""P11 from segments and journal: where every sampled token of the run ended.

Must not know: the processor. Invariants: sampled tokens are counted in the records of all attempts
of all launches, trained ones in what accepted steps computed; both are compared with what the
steps told of their members, never taken from it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from opengyre.seams.records import TurnRecord
from opengyre.store import observations as seen
from opengyre.trajectory.account import Reason, TokenAccount
from opengyre.views.check_tokens import Paths
from opengyre.views.consumed import (
    NOT_TOLD,
    STRUCTURAL,
    Consumed,
    reason_apart,
    told_account,
)
from opengyre.views.findings import CheckResult, Findings
from opengyre.views.restored import Line, Lines
from opengyre.views.run_state import ExecutionView, RunState
from opengyre.views.words import tokens_by_reason

MAX_FLAT_SPREAD = 1e-6
"""With values so far apart the standard deviation counts in any group of up to 10,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """Tokens of one execution, as the records and the accepted paths have them; `dropped` by
    reasons that a turn has by itself."""

    sampled: int
    trained: int
    dropped: Counter[str]

    def account(self, rest: str) -> TokenAccount:
        """What is neither trained nor dropped by its own turn is dropped for `rest`."""
        num_rest = self.sampled - self.trained - self.dropped.total()
        dropped = self.dropped + Counter({rest: num_rest})
        return TokenAccount(sampled=self.sampled, trained=self.trained, dropped=dict(dropped))


class AccountChecks:
    """P11. `see` each execution that sampled or trained, then `finish`."""

    def __init__(self, state: RunState, consumed: Consumed) -> None:
        self._state = state
        self._consumed = consumed
        self._seen: set[str] = set()
        self._total = TokenAccount()
        self._findings = Findings(
            promise="P11",
            words="every sampled token is trained, masked or dropped, for a reason",
            unit="executions",
        )

    def see(self, execution: str, lines: Lines, paths: Paths) -> None:
        self._seen.add(execution)
        marks = _Marks()
        for path in paths:
            for problem in marks.add(path, lines):
                self._findings.broken(f"{execution}: {problem}")
        recount = Recount(
            sampled=lines.num_sampled, trained=marks.num_trained, dropped=lines.dropped()
        )
        self._settle(execution, recount)

    def finish(self, untold: Iterable[TurnRecord] = ()) -> CheckResult:
        """`untold`: headers of records that the journal does not know."""
        for execution in sorted({*self._consumed.step_by_execution, *self._consumed.told}):
            if execution not in self._seen:
                self._settle(execution, Recount(sampled=0, trained=0, dropped=Counter()))
        self._add_untold(list(untold))
        self._findings.notes += _total_lines(self._total)
        if self._consumed.untold:
            words = "steps told no accounts (an older version wrote them): not compared"
            self._findings.notes.append(f"{len(self._consumed.untold)} {words}")
        return self._findings.result()

    def _settle(self, execution: str, recount: Recount) -> None:
        """Compare, and add to the totals."""
        step = self._consumed.step_by_execution.get(execution)
        told = self._consumed.told.get(execution, [])
        if step is None:
            self._total += recount.account(self._reason_apart(execution))
            is_told = bool(told or recount.trained)
            words = f"{execution} has an account or trained tokens, but no step consumed it"
            self._findings.expect(not is_told, words)
        elif not told and step in self._consumed.untold:
            self._total += recount.account(NOT_TOLD)
        elif len(told) != 1:
            self._total += recount.account(NOT_TOLD)
            words = f"{execution} was consumed by step {step} and has {len(told)} accounts"
            self._findings.expect(False, words)
        else:
            self._total += told_account(told[0])
            problems = [*_problems(told[0], recount), *self._reason_problems(told[0], step)]
            words = f"{execution} in step {step}: {'; '.join(problems)}"
            self._findings.expect(not problems, words)

    def _reason_problems(self, told: seen.MemberAccount, step: int) -> Iterable[str]:
        """Reasons of a whole execution must be what the journal says of it elsewhere."""
        one = self._state.executions[told.execution]
        of_part = set(told.dropped) - STRUCTURAL
        known = ""
        if one.value is None:
            known = one.exclusion.partition(":")[0] or Reason.NO_VERDICT.value
        if not of_part <= {known}:
            yield f"dropped as {', '.join(sorted(of_part))}, it is {known or 'valid'}"
        is_refused = step in self._consumed.unapplied
        if Reason.NOT_APPLIED in told.masked and not is_refused:
            yield "masked as not_applied in a step that was"
        spread = self._spread(one)
        if Reason.NO_VARIANCE in told.masked and spread >= MAX_FLAT_SPREAD:
            yield f"masked as no_variance in a group whose values are {spread:.3g} apart"
        if told.trained and spread == 0:
            yield "trained in a group whose values are equal"

    def _spread(self, one: ExecutionView) -> float:
        group = self._state.groups.get(one.group or "")
        return 0.0 if group is None else max(group.highest - group.lowest, 0.0)

    def _reason_apart(self, execution: str) -> str:
        one = self._state.executions.get(execution)
        return NOT_TOLD if one is None else reason_apart(self._state, one)

    def _add_untold(self, headers: list[TurnRecord]) -> None:
        num_tokens = sum(one.num_completion_tokens for one in headers)
        if not headers:
            return
        dropped = {str(Reason.NOT_COMMITTED): num_tokens}
        self._total += TokenAccount(sampled=num_tokens, dropped=dropped)
        words = "are in the segments and were never told; counted as not committed"
        self._findings.notes.append(f"{len(headers)} records of {num_tokens} tokens {words}")


class _Marks:
    """Which sampled tokens of each line were trained."""

    def __init__(self) -> None:
        self._marks: dict[Line, bytearray] = {}

    @property
    def num_trained(self) -> int:
        return sum(sum(one) for one in self._marks.values())

    def add(self, path: seen.PathDigest, lines: Lines) -> Iterable[str]:
        """Mark what `path` trained; yields what is wrong with it."""
        leaf = _leaf(path, lines)
        if leaf is None:
            yield f"a path to {path.turn or 'an unknown leaf'} is no recorded line"
            return
        for line, (low, high) in leaf.parts(path.trained):
            begin, end = low - line.sampled_begin, high - line.sampled_begin
            problem = self._mark(line, max(begin, 0), end, reason=lines.reason_of(line))
            if problem:
                yield problem

    def _mark(self, line: Line, begin: int, end: int, *, reason: Reason | None) -> str:
        if begin >= end:
            return ""
        marks = self._marks.setdefault(line, bytearray(len(line.completion)))
        is_twice = any(marks[begin:end])
        marks[begin:end] = b"\x01" * (end - begin)
        if is_twice:
            return f"tokens [{begin}, {end}) of {line.turn.turn} are trained twice"
        if reason is not None:
            return f"{line.turn.turn} attempt {line.turn.attempt} is trained and {reason.value}"
        return ""


def _leaf(path: seen.PathDigest, lines: Lines) -> Line | None:
    """Older runs do not always name it."""
    if path.turn:
        return lines.standing(path.turn)
    found = (
        one
        for one in lines.all
        if one.num_tokens == path.num_tokens and one.ids_crc32 == path.ids_crc32
    )
    return next(found, None)


def _problems(told: seen.MemberAccount, recount: Recount) -> Iterable[str]:
    if not told_account(told).is_balanced:
        yield (
            f"{told.trained} trained, {sum(told.masked.values())} masked and "
            f"{sum(told.dropped.values())} dropped are not {told.sampled} sampled"
        )
    if told.sampled != recount.sampled:
        yield f"{told.sampled} tokens told as sampled, {recount.sampled} are recorded"
    if told.trained != recount.trained:
        yield f"{told.trained} tokens told as trained, accepted steps trained {recount.trained}"
    own = {reason: num for reason, num in told.dropped.items() if reason in STRUCTURAL}
    if own != dict(recount.dropped):
        yield f"dropped by their turns {own}, recorded {dict(recount.dropped)}"


def _total_lines(total: TokenAccount) -> list[str]:
    masked, dropped = sum(total.masked.values()), sum(total.dropped.values())
    parts = f"{total.trained} trained + {masked} masked + {dropped} dropped"
    lines = [f"{total.sampled} tokens sampled = {parts}"]
    lines += [f"masked: {tokens_by_reason(total.masked)}"] if masked else []
    return lines + ([f"dropped: {tokens_by_reason(total.dropped)}"] if dropped else [])
