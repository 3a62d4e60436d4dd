"""How commands and facts change engines: roles, publications, losses, and their time lines.

Owns: the role of every engine, as the journal shows it. Must not know: executions, groups.
Invariants: an answer counts once, and not after its engine was lost; a lost engine is in no role.
"""

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.store.observations import Activity, Role
from opengyre.views.lanes import extend
from opengyre.views.run_state import EngineView, Happening, RunState

OF_ENGINE = (c.CloseDoor, c.Freeze, c.OpenDoor, c.Publish)
OF_CELL = (c.EnterTraining, c.LeaveTraining, c.Admit)
OF_CORE = (c.OpenStep, c.CloseStep, c.Offer, c.Checkpoint, c.Expose)


class EngineFold:
    """Changes `state.engines`. `pending` holds commands whose answer still counts."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.pending: dict[int, c.AnyCommand] = {}

    def pass_time(self, now_s: float) -> None:
        for engine in self._state.engines.values():
            activity = self._activity(engine)
            if activity is not None:
                extend(engine.lane, activity, self._state.now_s, now_s)

    def quarantine_late(self) -> None:
        """At a plan: an engine that is not verified in time leaves the capacity."""
        started = self._state.started
        timeout_s = None if started is None else started.scheduler.get("publish_timeout_s")
        if timeout_s is None:
            return
        for engine in self._state.engines.values():
            is_late = self._state.now_s >= engine.publishing_since_s + timeout_s
            if engine.is_publishing and is_late:
                engine.is_quarantined = True

    def take_command(self, command: c.AnyCommand) -> None:
        self.pending[command.command_id] = command
        match command:
            case c.CloseDoor():
                engine = self._state.engine(command.engine)
                if engine.cell is not None and engine.role is Role.ROLLOUT:
                    engine.role = Role.LEAVING
            case c.EnterTraining():
                self._state.engine_of_cell(command.cell).role = Role.LEAVING
            case c.LeaveTraining():
                self._state.engine_of_cell(command.cell).role = Role.RETURNING
                self.mark("returning", f"c{command.cell}", command.reason)
            case c.OpenDoor():
                self._turn_back(self._state.engine(command.engine))
            case c.Publish():
                engine = self._state.engine(command.engine)
                self._turn_back(engine)
                engine.is_publishing, engine.publishing_since_s = True, self._state.now_s
                engine.is_quarantined, engine.due_version = False, command.version
            case c.Fence():
                self.lose(self._state.engine(command.engine), command.reason)
            case _:
                return

    def take_life(self, fact: f.EngineReady | f.EngineLost) -> bool:
        """Returns whether the fact counted; an older incarnation is refused."""
        engine = self._state.engine(fact.engine)
        is_ready = isinstance(fact, f.EngineReady)
        is_old = fact.incarnation < engine.incarnation + is_ready
        if is_old:
            return False
        engine.incarnation = fact.incarnation
        if isinstance(fact, f.EngineReady):
            if engine.role not in (Role.STARTING, Role.LOST):
                self.lose(engine, "a new incarnation took its place")
            engine.role = Role.ROLLOUT
            return True
        if engine.role is Role.LOST:
            return False
        self.lose(engine, fact.reason)
        return True

    def answer(self, command_id: int) -> c.AnyCommand | None:
        """The command, the first time it is answered and if that still counts."""
        return self.pending.pop(command_id, None)

    def applied(self, command: c.AnyCommand) -> None:
        match command:
            case c.EnterTraining():
                self._state.engine_of_cell(command.cell).role = Role.TRAINING
                self._state.num_role_changes += 1
                self.mark("training", f"c{command.cell}", command.reason)
            case c.LeaveTraining():
                self._state.engine_of_cell(command.cell).role = Role.ROLLOUT
                self._state.num_role_changes += 1
            case c.Publish():
                engine = self._state.engine(command.engine)
                if command.version == engine.due_version:
                    engine.is_publishing = engine.is_quarantined = False
            case _:
                return

    def lose(self, engine: EngineView, reason: str) -> None:
        engine.role = Role.LOST
        engine.is_publishing = engine.is_quarantined = False
        engine.live.clear()
        for command in list(self.pending.values()):
            if _names(command, engine):
                del self.pending[command.command_id]
        self.mark("lost", engine.engine, reason)

    def mark(self, what: str, where: str, words: str) -> None:
        happening = Happening(at_s=self._state.now_s, what=what, where=where, words=words)
        self._state.happenings.append(happening)

    def _turn_back(self, engine: EngineView) -> None:
        """A door is opened, or a version is due, at a cell that was leaving: it stays."""
        if engine.role is Role.LEAVING:
            engine.role = Role.ROLLOUT

    def _activity(self, engine: EngineView) -> Activity | None:
        match engine.role:
            case Role.STARTING:
                return None
            case _ if self._state.is_ending:
                return Activity.IDLE_AT_END
            case _ if engine.is_publishing:
                return Activity.PUBLISHING
            case Role.LEAVING | Role.RETURNING | Role.LOST:
                return Activity.MOVING
            case Role.TRAINING:
                is_closing = self._state.is_closing_step and engine.cell == 0
                return Activity.TRAINING if is_closing else Activity.WAITING_FOR_DATA
            case _ if engine.live:
                return Activity.GENERATING
            case _:
                return self._why_idle(engine)

    def _why_idle(self, engine: EngineView) -> Activity:
        """An engine in rollout without executions: a cell that could train waits for coverage."""
        state = self._state
        if state.started is None or engine.cell is None or not state.samples:
            return Activity.WAITING_FOR_SUPPLY
        size = state.started.groups_per_step
        supply = min(state.samples[-1].num_ready, size - state.num_assigned)
        has_supply = supply >= state.started.supply_fraction * size
        return Activity.WAITING_FOR_COVERAGE if has_supply else Activity.WAITING_FOR_SUPPLY


def _names(command: c.AnyCommand, engine: EngineView) -> bool:
    if isinstance(command, OF_ENGINE):
        return command.engine == engine.engine
    if isinstance(command, OF_CELL) and command.cell == engine.cell:
        return True
    return engine.cell == 0 and isinstance(command, OF_CORE)
