"""How commands and facts change executions, groups and steps.

Owns: counts, outcomes, verdicts, who is assigned and consumed. Must not know: roles.
Invariants: an execution closes once; a group is consumed by one accepted step, and given back
when the core loses steps that were not yet durable.
"""

from collections.abc import Iterable

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.groups import GroupState
from opengyre.seams.records import TurnRecord
from opengyre.store import observations as seen
from opengyre.views.restored import turn_number
from opengyre.views.run_state import ExecutionView, GroupView, RunState


class WorkFold:
    """Changes executions, groups, counts and the open step of `state`."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._undurable: set[int] = set()

    def take_command(self, command: c.AnyCommand) -> None:
        match command:
            case c.DispatchGroups():
                for group, members in command.groups:
                    self._add_group(command, group, members)
            case c.DispatchEval():
                self._dispatch(command, command.executions, None)
            case c.Launch():
                self._launch(command.execution, command.engine)
            case c.Cancel(was_queued=True):
                self._launch(command.execution, None)
                self.close(command.execution, f.Outcome.CANCELLED, is_last_word=True)
            case c.Reroute():
                for execution, engine in command.moves:
                    self._place(execution, engine)
            case _:
                self._take_step_command(command)

    def _take_step_command(self, command: c.AnyCommand) -> None:
        state = self._state
        match command:
            case c.OpenStep():
                state.open_step, state.is_closing_step = command.step, False
                state.steps = [one for one in state.steps if one.step != command.step]
            case c.CloseStep():
                state.is_closing_step = True
            case c.AbandonStep():
                self._abandon(command.step)
            case c.EndRun():
                state.is_ending = True
            case _:
                return

    def close(self, execution: str, outcome: f.Outcome, *, is_last_word: bool = False) -> None:
        """`is_last_word`: it never ran, so it has finally no verdict."""
        one = self._state.executions.get(execution)
        if one is None:
            return
        if one.outcome is not None:
            one.other_outcomes.append(outcome)
            return
        one.outcome, one.closed_s = outcome, self._state.now_s
        one.has_last_word = one.has_last_word or is_last_word
        self._state.counts.finished += 1
        if one.engine is not None:
            self._state.engine(one.engine).live.discard(execution)
        self._settle(one)

    def give_verdict(self, verdict: f.VerdictGiven) -> None:
        one = self._state.executions.get(verdict.execution)
        if one is None or one.has_last_word:
            return
        one.reward, one.verdict_reason = verdict.reward, verdict.reason
        one.value, one.exclusion = verdict.value, verdict.exclusion
        one.has_last_word = True
        self._settle(one)

    def begin_launch(self, told: seen.LaunchRecorded) -> None:
        """Turn numbers go on; what earlier launches told is given up."""
        one = self._state.executions.get(told.execution)
        if one is not None:
            one.task, one.num_launches = told.task, told.launch_number
            one.num_given_up_turns = one.last_turn

    def record(self, turn: TurnRecord) -> None:
        self._state.turns[turn.turn, turn.attempt] = turn
        one = self._state.executions.get(turn.execution)
        if one is not None:
            one.last_turn = max(one.last_turn, turn_number(turn.turn))

    def assign(self, fact: f.GroupAssigned) -> None:
        group = self._state.groups.get(fact.group)
        if group is not None and self._state.open_step == fact.step and not group.is_consumed:
            group.assigned_step = fact.step

    def give_back(self, fact: f.GroupReturned) -> None:
        """A stream that closes keeps its groups: the work is redone by another member."""
        group = self._state.groups.get(fact.group)
        is_open = self._state.open_step == fact.step and not self._state.is_closing_step
        if group is not None and is_open:
            group.assigned_step = None

    def commit(self, step: int) -> None:
        if self._state.open_step != step:
            return
        self._undurable.add(step)
        for group in list(self._state.open_groups.values()):
            if group.assigned_step == step:
                group.is_consumed = True
                del self._state.open_groups[group.group]
        self._state.open_step, self._state.is_closing_step = None, False

    def make_durable(self) -> None:
        self._undurable.clear()

    def lose_core(self) -> None:
        """What was not durable is redone: its groups are ready again."""
        if self._state.open_step is not None:
            self._abandon(self._state.open_step)
        for group in self._state.groups.values():
            if group.is_consumed and group.assigned_step in self._undurable:
                group.is_consumed, group.assigned_step = False, None
                self._state.open_groups[group.group] = group
        self._undurable.clear()

    def _abandon(self, step: int) -> None:
        if self._state.open_step != step:
            return
        for group in self._state.open_groups.values():
            if group.assigned_step == step:
                group.assigned_step = None
        self._state.open_step, self._state.is_closing_step = None, False

    def _add_group(self, command: c.DispatchGroups, group: str, members: tuple[str, ...]) -> None:
        view = GroupView(
            group=group,
            version=command.version,
            burst=command.burst,
            members=members,
            num_open=len(members),
        )
        self._state.groups[group] = self._state.open_groups[group] = view
        self._dispatch(command, members, group)

    def _dispatch(
        self, command: c.DispatchGroups | c.DispatchEval, members: Iterable[str], group: str | None
    ) -> None:
        self._state.burst = command.burst
        for execution in members:
            self._state.counts.dispatched += 1
            self._state.executions[execution] = ExecutionView(
                execution=execution,
                group=group,
                version=command.version,
                burst=command.burst,
                dispatched_s=self._state.now_s,
            )

    def _launch(self, execution: str, engine: str | None) -> None:
        one = self._state.executions.get(execution)
        if one is None or one.launched_s is not None:
            return
        one.launched_s = self._state.now_s
        self._state.counts.launched += 1
        if engine is not None:
            self._place(execution, engine)

    def _place(self, execution: str, engine: str) -> None:
        one = self._state.executions.get(execution)
        if one is None or one.outcome is not None:
            return
        if one.engine is not None:
            self._state.engine(one.engine).live.discard(execution)
        one.engine = engine
        self._state.engine(engine).live.add(execution)

    def _settle(self, one: ExecutionView) -> None:
        """A member is done for its group once it is closed and has its last word."""
        if one.group is None or one.outcome is None or not one.has_last_word:
            return
        group = self._state.groups[one.group]
        group.num_open -= 1
        if one.value is not None:
            group.num_valid += 1
            group.lowest = min(group.lowest, one.value)
            group.highest = max(group.highest, one.value)
        if self._state.group_state(group) in (GroupState.VOID, GroupState.FILTERED):
            self._state.open_groups.pop(group.group, None)
