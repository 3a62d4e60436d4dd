"""P1 to P4 from the journal: outcomes, waterlevel, coverage, the training set.

Must not know: the scheduler. Each check sees every row together with the state after it.
Invariant: nothing is taken from the scheduler's counters; where it told them they are compared.
"""

from collections.abc import Mapping
from typing import Protocol

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.config import PolicyName
from opengyre.store import observations as seen
from opengyre.store.journal import Row
from opengyre.store.observations import Role
from opengyre.views.findings import CheckResult, Findings
from opengyre.views.run_state import RunState


class RowCheck(Protocol):
    """Sees every row in order, and the end."""

    def see(self, row: Row, state: RunState) -> None: ...

    def finish(self, state: RunState) -> CheckResult: ...


class Boundaries:
    """Tells whether a plan is a boundary: the first after weights were exposed, no step open."""

    def __init__(self) -> None:
        self._is_exposed = False
        self._is_step_open = False

    @property
    def is_boundary(self) -> bool:
        """By the state before the row; ask before `see`."""
        return self._is_exposed and not self._is_step_open

    def see(self, row: Row, state: RunState) -> None:
        """Call after the checks saw the row."""
        self._is_step_open = state.open_step is not None
        if isinstance(row.value, c.Plan):
            self._is_exposed = False
        elif isinstance(row.value, f.CommandApplied):
            command = state.commands.get(row.value.command_id)
            self._is_exposed = self._is_exposed or isinstance(command, c.Expose)


class OneOutcome:
    """P1. `recorded` is the executions table: execution -> outcome."""

    def __init__(self, recorded: Mapping[str, str | None] | None = None) -> None:
        self._recorded = recorded
        self._findings = Findings(
            promise="P1",
            words="every dispatched execution has exactly one outcome",
            unit="executions",
        )

    def see(self, row: Row, state: RunState) -> None:
        match row.value:
            case f.ExecutionClosed() if row.value.execution not in state.executions:
                self._findings.broken(f"row {row.seq}: {row.value.execution} was never dispatched")
            case c.Plan():
                for command in row.value.commands:
                    if isinstance(command, c.Launch) and command.execution not in state.executions:
                        words = f"row {row.seq}: {command.execution} launched, never dispatched"
                        self._findings.broken(words)
            case _:
                return

    def finish(self, state: RunState) -> CheckResult:
        num_refused = 0
        for one in state.executions.values():
            self._findings.expect(one.outcome is not None, f"{one.execution} has no outcome")
            num_refused += len(one.other_outcomes)
            others = [other.value for other in one.other_outcomes if other is not one.outcome]
            if others:
                self._findings.broken(f"{one.execution} closed as {one.outcome} and {others[0]}")
            if self._recorded is not None:
                self._compare(one.execution, one.outcome)
        if num_refused:
            self._findings.notes.append(f"{num_refused} repeated outcomes were refused")
        if state.ended is None:
            self._findings.notes.append("the run has no end row")
        return self._findings.result()

    def _compare(self, execution: str, outcome: f.Outcome | None) -> None:
        told = None if outcome is None else outcome.value
        recorded = (self._recorded or {}).get(execution, "missing")
        if recorded != told:
            words = f"{execution}: the executions table says {recorded}, the journal {told}"
            self._findings.broken(words)


class Waterlevel:
    """P2."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        self._unfinished: set[str] = set()
        self._last_waterlevel = 0
        self._findings = Findings(
            promise="P2",
            words="w is the number of unfinished executions and rises only at a boundary",
            unit="rows",
        )

    def see(self, row: Row, state: RunState) -> None:
        is_dispatch = False
        if isinstance(row.value, c.Plan):
            is_dispatch = self._see_plan(row, row.value)
        elif isinstance(row.value, f.ExecutionClosed):
            self._unfinished.discard(row.value.execution)
        elif isinstance(row.value, f.CommandFailed):
            command = state.commands.get(row.value.command_id)
            if isinstance(command, c.Launch):
                self._unfinished.discard(command.execution)
        counts, now = state.counts, state.counts.waterlevel
        told = f"d {counts.dispatched}, p {counts.launched}, f {counts.finished}"
        is_ordered = 0 <= counts.finished <= counts.launched <= counts.dispatched
        self._findings.expect(is_ordered, f"row {row.seq}: 0 <= f <= p <= d broken: {told}")
        if now > self._last_waterlevel:
            may_rise = is_dispatch and self._boundaries.is_boundary
            if not may_rise:
                words = f"w rises from {self._last_waterlevel} to {now} inside a burst"
                self._findings.broken(f"row {row.seq}: {words}")
        self._last_waterlevel = now
        if isinstance(row.value, seen.SchedulerCounts):
            self._compare(row, row.value, state)

    def finish(self, state: RunState) -> CheckResult:
        return self._findings.result()

    def _see_plan(self, row: Row, plan: c.Plan) -> bool:
        dispatched: list[str] = []
        for command in plan.commands:
            match command:
                case c.DispatchGroups():
                    dispatched += [one for _, members in command.groups for one in members]
                case c.DispatchEval():
                    dispatched += command.executions
                case _:
                    continue
        before = len(self._unfinished)
        self._unfinished.update(dispatched)
        if len(self._unfinished) != before + len(dispatched):
            self._findings.broken(f"row {row.seq}: an execution is dispatched twice")
        for command in plan.commands:
            if isinstance(command, c.Cancel) and command.was_queued:
                self._unfinished.discard(command.execution)
        return bool(dispatched)

    def _compare(self, row: Row, told: seen.SchedulerCounts, state: RunState) -> None:
        counts = state.counts
        ours = (counts.dispatched, counts.launched, counts.finished)
        theirs = (told.num_dispatched, told.num_launched, told.num_finished)
        if ours != theirs:
            words = f"the scheduler counts d, p, f as {theirs}, the journal gives {ours}"
            self._findings.broken(f"row {row.seq}: {words}")
        if len(self._unfinished) != told.num_dispatched - told.num_finished:
            words = f"{len(self._unfinished)} executions are unfinished by their ids"
            self._findings.broken(f"row {row.seq}: {words}, the scheduler counts {theirs}")


class Coverage:
    """P3. A cell that is leaving when a burst ends turns back: it counts as returning."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        self._turning: set[int] = set()
        self._findings = Findings(
            promise="P3",
            words="capacity covers the waterlevel whenever a cell leaves or trains",
            unit="rows",
        )

    def see(self, row: Row, state: RunState) -> None:
        leaving = set(state.cells(Role.LEAVING))
        self._turning &= {*leaving, *state.cells(Role.TRAINING)}
        if isinstance(row.value, c.Plan) and self._boundaries.is_boundary:
            self._turning |= leaving
        if isinstance(row.value, c.Plan):
            closing = [one for one in row.value.commands if isinstance(one, c.CloseDoor)]
            if closing:
                self._check_begin(row, state, [state.engine(one.engine).cell for one in closing])
        away = set(state.cells(Role.LEAVING, Role.TRAINING)) - self._turning
        if any(_changes_role(state, one) for one in away):
            self._check_cover(row, state)

    def finish(self, state: RunState) -> CheckResult:
        return self._findings.result()

    def _check_begin(self, row: Row, state: RunState, cells: list[int | None]) -> None:
        """Strict: what is left after the cells covers w, and no other transition is under way."""
        named = " and ".join(f"cell {one} leaves" for one in cells)
        others = state.cells(Role.LEAVING, Role.RETURNING)
        if others != cells:
            words = f"{named} while a transition of {others} is under way"
            self._findings.broken(f"row {row.seq}: {words}")
        if len(cells) > 1 and _policy(state) is not PolicyName.COLOCATE:
            self._findings.broken(f"row {row.seq}: {named}, together")
        waterlevel = state.counts.waterlevel
        words = f"{named} with w = {waterlevel} and {state.capacity} slots left"
        self._findings.expect(state.capacity >= waterlevel, f"row {row.seq}: {words}")

    def _check_cover(self, row: Row, state: RunState) -> None:
        """Slots that return, and those that were lost (the exception), count here."""
        excused = (Role.RETURNING, Role.LOST)
        slots = sum(
            one.slots
            for one in state.engines.values()
            if one.counts_for_capacity
            or one.role in excused
            or one.is_quarantined
            or one.cell in self._turning
        )
        waterlevel = state.counts.waterlevel
        words = f"w = {waterlevel} but only {slots} slots while cells leave or train"
        self._findings.expect(slots >= waterlevel, f"row {row.seq}: {words}")


class TrainingPrefix:
    """P4."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        self._dead: set[int] = set()
        self._training: set[int] = set()
        self._joining: set[int] = set()
        self._findings = Findings(
            promise="P4", words="the training set is a prefix of the living cells", unit="changes"
        )

    def see(self, row: Row, state: RunState) -> None:
        self._note_deaths(row, state)
        training = set(state.cells(Role.TRAINING))
        joining = set(state.cells(Role.LEAVING, Role.TRAINING))
        if joining - self._joining:
            living = [one for one in _all_cells(state) if one not in self._dead]
            is_prefix = sorted(joining) == living[: len(joining)]
            words = f"cells {sorted(joining)} leave or train, the living cells are {living}"
            self._findings.expect(is_prefix, f"row {row.seq}: {words}")
        for cell in sorted(self._training - training):
            self._check_departure(row, state, cell)
        if isinstance(row.value, f.MemberAdmitted):
            cell, roles = row.value.cell, (Role.TRAINING, Role.LOST)
            is_member = state.engine_of_cell(cell).role in roles
            words = f"cell {cell} is a member of step {row.value.step} but not in training"
            self._findings.expect(is_member, f"row {row.seq}: {words}")
        self._training, self._joining = training, joining

    def finish(self, state: RunState) -> CheckResult:
        return self._findings.result()

    def _note_deaths(self, row: Row, state: RunState) -> None:
        """A lost satellite leaves the order until the next boundary; the core never does."""
        if isinstance(row.value, c.Plan) and self._boundaries.is_boundary:
            self._dead = set(state.cells(Role.LOST))
        self._dead |= set(state.cells(Role.LOST))
        self._dead.discard(0)

    def _check_departure(self, row: Row, state: RunState, cell: int) -> None:
        is_death = state.engine_of_cell(cell).role is Role.LOST
        is_recall = cell == max(self._training)
        is_allowed = is_death or is_recall or self._boundaries.is_boundary
        words = f"cell {cell} stops training inside a burst, before {max(self._training)}"
        self._findings.expect(is_allowed, f"row {row.seq}: {words}")


def _policy(state: RunState) -> PolicyName:
    started = state.started
    told = None if started is None else started.scheduler.get("policy")
    return PolicyName.ELASTIC if told is None else PolicyName(told)


def _changes_role(state: RunState, cell: int) -> bool:
    return not state.engine_of_cell(cell).always_trains


def _all_cells(state: RunState) -> list[int]:
    return sorted(one.cell for one in state.engines.values() if one.cell is not None)
