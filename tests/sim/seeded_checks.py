"""The promises, checked at each row of the journal and each record of the gateway as it appears.

Owns: incremental use of the checks behind `gyre run verify`, and of what only a world can know.
Must not know: how the world makes faults. Invariant: the first broken promise is told at the
step that broke it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from opengyre.control import commands as c
from opengyre.control.config import SchedulerConfig
from opengyre.control.facts import CommandApplied, StepCommitted
from opengyre.control.scheduler import Scheduler
from opengyre.engines.scripted import pseudo_logprob
from opengyre.gateway.gateway import turn_seed
from opengyre.gateway.request import Sampling
from opengyre.seams.errors import BoundaryError
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord
from opengyre.store.checkpoints import Checkpoints
from opengyre.store.journal import Row
from opengyre.store.observations import TurnRecorded
from opengyre.store.run_folder import RunFolder
from opengyre.store.segments import SegmentReader, segment_numbers
from opengyre.trajectory.turns import ForkReason
from opengyre.views.check_accounts import AccountChecks
from opengyre.views.check_control import (
    Boundaries,
    Coverage,
    OneOutcome,
    RowCheck,
    TrainingPrefix,
    Waterlevel,
)
from opengyre.views.check_handoffs import HandoffChecks
from opengyre.views.check_steps import ExactlyOnce
from opengyre.views.check_tokens import TokenChecks
from opengyre.views.check_verdicts import VerdictChecks
from opengyre.views.consumed import consumed_by
from opengyre.views.findings import CheckResult
from opengyre.views.fold import Fold
from opengyre.views.replay import replay
from opengyre.views.run_state import RunState

Wrong = Callable[[str], None]


class RowChecks:
    """P1 to P4 and P8 after every row; P5, P6, P10 to P12, P16 of prefixes
    and what was told of turns at the end."""

    def __init__(self, wrong: Wrong) -> None:
        self._wrong = wrong
        self.rows: list[Row] = []
        self.launches: set[str] = set()
        self._told: set[SegmentRef] = set()
        self._turns: set[tuple[str, int]] = set()
        self._fold = Fold()
        self._boundaries = Boundaries()
        self._steps = ExactlyOnce()
        self._outcomes = OneOutcome()
        self._handoffs = HandoffChecks()
        self._each_row: list[RowCheck] = [
            Waterlevel(self._boundaries),
            Coverage(self._boundaries),
            TrainingPrefix(self._boundaries),
        ]

    @property
    def state(self) -> RunState:
        """What the journal tells so far."""
        return self._fold.state

    def see(self, row: Row) -> None:
        self.rows.append(row)
        if isinstance(row.value, TurnRecorded):
            self._see_turn(row.value.turn)
        self._fold.apply(row)
        state = self._fold.state
        self._outcomes.see(row, state)
        self._steps.see(row, state)
        self._handoffs.see(row, state)
        for check in self._each_row:
            check.see(row, state)
            self._judge(check.finish(state))
        self._boundaries.see(row, state)
        if isinstance(row.value, StepCommitted):
            self._judge(self._steps.finish(state))

    def finish(self, tokens: Path, *, is_whole: bool) -> None:
        """At the end. A run that was cut has executions without an outcome."""
        state = self._fold.state
        if is_whole:
            self._judge(self._outcomes.finish(state))
            self._judge(self._steps.finish(state))
            for result in self._handoffs.finish(state):
                self._judge(result)
            self._all_told(tokens)
            self._check_tokens(SegmentReader(tokens), state)
        result = replay(self.rows, _scheduler)
        if not result.is_same:
            self._wrong(f"replay: {result.difference}")

    def _check_tokens(self, reader: SegmentReader, state: RunState) -> None:
        consumed = consumed_by(self._steps.reports(), state)
        accounts = AccountChecks(state, consumed)
        checks = TokenChecks(reader)
        told = checks.check(state, self._steps.accepted(), also=accounts.see)
        for result in (*told, accounts.finish(), VerdictChecks().check(state, consumed)):
            self._judge(result)

    def _see_turn(self, turn: TurnRecord) -> None:
        """Agents rewrite nothing, so whatever they send back goes on from what they got."""
        if (turn.turn, turn.attempt) in self._turns:
            self._wrong(f"P11: {turn.turn} attempt {turn.attempt} is told twice")
        self._turns.add((turn.turn, turn.attempt))
        self._told.add(turn.ref)
        if turn.fork_reason == ForkReason.REWRITTEN_TURN:
            self._wrong(f"P10: an answer that {turn.turn} goes on from is not known")

    def _all_told(self, tokens: Path) -> None:
        """Every durable turn was told, whoever died after it was written."""
        reader = SegmentReader(tokens)
        for segment in segment_numbers(tokens):
            for record in reader.scan(segment):
                if record.header.ref not in self._told:
                    self._wrong(f"P11: {record.header.turn} is on disk and was never told")

    def _judge(self, result: CheckResult) -> None:
        for problem in result.problems[:1]:
            self._wrong(f"{result.promise}: {problem}")


def _scheduler(fields: dict[str, Any]) -> Scheduler:
    return Scheduler(msgspec.convert(fields, SchedulerConfig))


def launched_in(rows: list[Any]) -> set[str]:
    """Executions that a launch in these journal rows starts."""
    plans = [row.value for row in rows if isinstance(row.value, c.Plan)]
    return {
        command.execution
        for plan in plans
        for command in plan.commands
        if isinstance(command, c.Launch)
    }


def logprob_problem(record: TokenRecord, execution_seed: int) -> str | None:
    """Each token's logprob is that of its place, of the turn's seed and of its span's version."""
    header = record.header
    number = int(header.turn.rpartition(".t")[2])
    seed = turn_seed(execution_seed, number, Sampling())
    start = header.num_kept_tokens + header.num_new_prompt_tokens
    for span in header.spans:
        for place in range(span.start, span.end):
            if record.logprobs[place] != pseudo_logprob(seed, start + place, span.policy_version):
                return (
                    f"P6: {header.turn} token {place}: its logprob is not of version "
                    f"{span.policy_version}"
                )
    return None


def check_what_is_left(rows: list[Row], folder: Path, wrong: Wrong) -> None:
    """After a crash: every turn and checkpoint that a surviving row tells of can be read (P13),
    and the rows, replayed, give the same plans."""
    run = RunFolder(folder / "run")
    reader, checkpoints = SegmentReader(run.tokens), Checkpoints(run.checkpoints)
    try:
        for turn in [row.value.turn for row in rows if isinstance(row.value, TurnRecorded)]:
            reader.read(turn.ref)
        durable = _durable_steps(rows)
        if durable:
            checkpoints.check(durable[-1])
    except BoundaryError as error:
        wrong(f"P13: {error}")
    result = replay(rows, _scheduler)
    if not result.is_same:
        wrong(f"replay of what is left: {result.difference}")


def _durable_steps(rows: list[Row]) -> list[int]:
    """Steps whose checkpoint was acknowledged, in order."""
    plans = [row.value for row in rows if isinstance(row.value, c.Plan)]
    commands = [command for plan in plans for command in plan.commands]
    steps = {one.command_id: one.step for one in commands if isinstance(one, c.Checkpoint)}
    applied = [row.value for row in rows if isinstance(row.value, CommandApplied)]
    return [steps[one.command_id] for one in applied if one.command_id in steps]
