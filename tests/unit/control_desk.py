"""A desk at which a test plays the shell by hand: it answers, holds or fails each command.

Owns: the scheduler under test, its time, and the commands that were given. Must not know: rules.
"""

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.config import EngineSpec, SchedulerConfig
from opengyre.control.ids import (
    EngineId,
    ExecutionId,
    GroupId,
    cell_engine_id,
    standalone_engine_id,
)
from opengyre.control.scheduler import Scheduler
from opengyre.control.view import SchedulerView

MAX_ROUNDS = 200


def make_config(
    *, num_cells: int = 2, num_standalone: int = 1, slots: int = 8, **numbers: object
) -> SchedulerConfig:
    """Small and quick: N 2, B 2, mu 1, phi 0, no hold."""
    specs = [EngineSpec(engine=cell_engine_id(k), slots=slots, cell=k) for k in range(num_cells)]
    specs += [
        EngineSpec(engine=standalone_engine_id(k), slots=slots, cell=None)
        for k in range(num_standalone)
    ]
    defaults: dict[str, object] = {
        "num_steps": 4,
        "group_size": 2,
        "groups_per_step": 2,
        "steps_per_burst": 1,
        "run_ahead": 0,
        "supply_fraction": 0.5,
        "supply_hold_s": 0.0,
        "is_strict": True,
    }
    return SchedulerConfig(
        num_cells=num_cells,
        engines=tuple(specs),
        **{**defaults, **numbers},  # type: ignore[arg-type]
    )


class Desk:
    """`held` command types are not answered by `settle`; `given` keeps every command."""

    def __init__(self, config: SchedulerConfig, *held: type[c.Command]) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.now_s = 0.0
        self.held: set[type[c.Command]] = set(held)
        self.given: list[c.AnyCommand] = []
        self.waiting_for: tuple[str, ...] = ()
        self.members_by_group: dict[GroupId, tuple[ExecutionId, ...]] = {}
        self.evals: list[ExecutionId] = []
        self.version = config.initial_version

    def start(self) -> "Desk":
        for spec in self.config.engines:
            self.tell(f.EngineReady(engine=spec.engine, incarnation=1, version=self.version))
        self.settle()
        return self

    @property
    def view(self) -> SchedulerView:
        return self.scheduler.snapshot()

    def tell(self, *facts: f.Fact) -> None:
        for fact in facts:
            self.scheduler.observe(fact, self.now_s)

    def settle(self, after_s: float = 0.0) -> list[c.AnyCommand]:
        """Answer everything that is not held until nothing new is commanded."""
        self.now_s += after_s
        new: list[c.AnyCommand] = []
        for _ in range(MAX_ROUNDS):
            plan = self.scheduler.decide(self.now_s)
            self.waiting_for = plan.waiting_for
            if not plan.commands:
                self.given.extend(new)
                return new
            new.extend(plan.commands)
            for command in plan.commands:
                self._note(command)
                if type(command) not in self.held:
                    self.apply(command)
        raise AssertionError("the desk never comes to rest")

    def apply(self, command: c.AnyCommand) -> None:
        if isinstance(command, c.Admit):
            self.tell(f.MemberAdmitted(step=command.step, cell=command.cell))
        self.tell(f.CommandApplied(command_id=command.command_id))

    def fail(self, command: c.AnyCommand, *, is_unknown: bool = False) -> None:
        kind = f.CommandUnknown if is_unknown else f.CommandFailed
        self.tell(kind(command_id=command.command_id, reason="the test says so"))

    def last(self, kind: type[c.Command]) -> c.AnyCommand:
        return next(command for command in reversed(self.given) if type(command) is kind)

    def close(self, *executions: ExecutionId, reward: float | None = 1.0) -> None:
        for execution in executions:
            self.tell(
                f.ExecutionClosed(execution=execution, outcome=f.Outcome.COMPLETED),
                f.VerdictGiven(
                    execution=execution, reward=reward, reason="", num_trainable_tokens=1
                ),
            )

    def finish(self, *groups: str, reward: float | None = 1.0) -> list[c.AnyCommand]:
        """Every member of these groups closes with this verdict."""
        for group in groups:
            self.close(*self.members_by_group[GroupId(group)], reward=reward)
        return self.settle()

    def judge(self, group: str, *values: float, exclusion: str = "") -> list[c.AnyCommand]:
        """Its members close with reward 1 and these values as shaped; the first with `exclusion`
        beside it."""
        for place, member in enumerate(self.members_by_group[GroupId(group)]):
            self.tell(
                f.ExecutionClosed(execution=member, outcome=f.Outcome.COMPLETED),
                f.VerdictGiven(
                    execution=member,
                    reward=1.0,
                    reason="",
                    num_trainable_tokens=1,
                    shaped=values[place],
                    exclusion="" if place else exclusion,
                ),
            )
        return self.settle()

    def assign(self, *groups: str) -> list[c.AnyCommand]:
        """The stream claims the first micro-step of each."""
        step = self.view.step
        assert step is not None
        self.tell(*(f.GroupAssigned(group=GroupId(group), step=step) for group in groups))
        return self.settle()

    def commit(self) -> list[c.AnyCommand]:
        step = self.view.step
        assert step is not None
        self.version += 1
        self.tell(f.StepCommitted(step=step, version=self.version))
        return self.settle()

    def train(self, *groups: str) -> list[c.AnyCommand]:
        """Finish, assign and commit these groups as one step."""
        self.finish(*groups)
        self.assign(*groups)
        return self.commit()

    def lose(self, engine: str) -> list[c.AnyCommand]:
        self.tell(f.EngineLost(engine=EngineId(engine), incarnation=1, reason="killed"))
        return self.settle()

    def bring_back(self, engine: str, *, version: int, incarnation: int = 2) -> None:
        self.tell(f.EngineReady(engine=EngineId(engine), incarnation=incarnation, version=version))

    def _note(self, command: c.AnyCommand) -> None:
        if isinstance(command, c.DispatchGroups):
            self.members_by_group.update(command.groups)
        if isinstance(command, c.DispatchEval):
            self.evals.extend(command.executions)


def names(commands: list[c.AnyCommand]) -> list[str]:
    return [type(command).__name__ for command in commands]
