"""The step stream as a fluid: all members work on the group at its head.

Owns: the open step, who works on it, when its groups are assigned and it is committed. Must not
know: roles, supply, why a member left.
Invariants: work is done by members alone; the work of a member that left is done again; a group
is assigned when work on it begins.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from opengyre.control.commands import CloseStep
from opengyre.control.errors import InvariantError
from opengyre.control.facts import CommandApplied, Fact, GroupAssigned, GroupReturned, StepCommitted
from opengyre.control.ids import GroupId
from opengyre.simulate.costs import TrainingCosts
from opengyre.simulate.kernel import Kernel, Token

CORE = 0


@dataclass(slots=True, kw_only=True)
class Member:
    """`rate` in mean groups/s; `joined` is the step's work per unit of rate when it joined."""

    devices: int
    rate: float
    joined: float
    is_alive: bool = True
    left: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class OpenStep:
    """`weights`: work of each assigned group, in order, in mean groups. `done`: work done, in the
    same unit; `pulse`: the integral of time at work. `begins_s`: work begins then (bubble)."""

    step: int
    version: int
    offered: list[GroupId] = field(default_factory=list)
    assigned: list[GroupId] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    rate: float = 0.0
    devices: int = 0
    total: float = 0.0
    done: float = 0.0
    pulse: float = 0.0
    settled_s: float = 0.0
    begins_s: float = 0.0
    is_working: bool = False
    close: CloseStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamParts:
    """`weigh(group)`: its work in mean groups. `work_on(devices)`: so many devices work now.
    `committed(step, version, groups)`: the update is made."""

    kernel: Kernel
    costs: TrainingCosts
    max_groups: int
    tell: Callable[[Fact], None]
    weigh: Callable[[GroupId], float]
    work_on: Callable[[int], None]
    committed: Callable[[int, int, tuple[GroupId, ...]], None]


class Stream:
    """At most one step is open. Every change settles the work first and plans the next event."""

    def __init__(self, parts: StreamParts) -> None:
        self._parts = parts
        self._kernel = parts.kernel
        self._costs = parts.costs
        self._step: OpenStep | None = None
        self._token: Token | None = None
        self.redone_groups = 0.0

    def open(self, step: int, version: int, core_devices: int) -> None:
        if self._step is not None:
            raise InvariantError(f"step {step} opens while step {self._step.step} is open")
        self._step = OpenStep(step=step, version=version, settled_s=self._kernel.now_s)
        self._join(self._step, CORE, core_devices)

    def offer(self, step: int, groups: tuple[GroupId, ...]) -> None:
        opened = self._open(step)
        if opened is None or opened.close is not None:
            return
        taken = dict.fromkeys(opened.assigned)
        opened.offered = [group for group in groups if group not in taken]
        self._go_on(opened)

    def admit(self, step: int, cell: int, devices: int) -> bool:
        """False if the step is over or closing, or the cell was dropped from it."""
        opened = self._open(step)
        if opened is None or opened.close is not None or cell in opened.dropped:
            return False
        self._join(opened, cell, devices)
        self._go_on(opened)
        return True

    def close(self, command: CloseStep) -> None:
        opened = self._open(command.step)
        if opened is None:
            raise InvariantError(f"step {command.step} closes, but it is not open")
        if command.num_groups != len(opened.assigned):
            raise InvariantError(f"step {command.step}: {len(opened.assigned)} groups assigned")
        opened.close = command
        self._go_on(opened)

    def lose(self, cell: int) -> None:
        """The process of a member died: it works no more. Without the core the step is gone."""
        opened = self._step
        if opened is None or cell not in opened.members:
            return
        if cell == CORE:
            self.abandon(opened.step)
            return
        self._settle(opened)
        self._stop(opened, cell)
        self._go_on(opened)

    def drop(self, step: int, cell: int) -> None:
        """Its work comes back; groups that came back whole are told if the step is not closing."""
        opened = self._open(step)
        if opened is None:
            return
        opened.dropped.add(cell)
        if cell not in opened.members:
            return
        self._settle(opened)
        self._stop(opened, cell)
        lost = opened.members.pop(cell).left
        opened.done = max(0.0, opened.done - lost)
        self.redone_groups += lost
        if opened.close is None and lost > 0:
            self._give_back(opened)
        opened.is_working = False
        self._go_on(opened)

    def abandon(self, step: int) -> None:
        """The step is gone, weights unchanged."""
        opened = self._open(step)
        if opened is None:
            return
        self._settle(opened)
        self.redone_groups += opened.done
        self._step = None
        self._plan(None)
        self._parts.work_on(0)

    def _open(self, step: int) -> OpenStep | None:
        return self._step if self._step is not None and self._step.step == step else None

    def _join(self, opened: OpenStep, cell: int, devices: int) -> None:
        self._settle(opened)
        rate = self._costs.groups_per_s(devices, is_core=cell == CORE)
        opened.members[cell] = Member(devices=devices, rate=rate, joined=opened.pulse)
        opened.rate += rate
        opened.devices += devices

    def _stop(self, opened: OpenStep, cell: int) -> None:
        member = opened.members[cell]
        if not member.is_alive:
            return
        member.is_alive = False
        member.left = member.rate * (opened.pulse - member.joined)
        opened.devices -= member.devices
        opened.rate = sum(one.rate for one in opened.members.values() if one.is_alive)

    def _settle(self, opened: OpenStep) -> None:
        now_s = self._kernel.now_s
        if opened.is_working:
            worked_s = max(0.0, now_s - max(opened.settled_s, opened.begins_s))
            opened.pulse += worked_s
            opened.done = min(opened.total, opened.done + worked_s * opened.rate)
        opened.settled_s = now_s

    def _give_back(self, opened: OpenStep) -> None:
        """The groups at the end that no work is left in."""
        step, returned = opened.step, []
        while opened.assigned and opened.total - opened.weights[-1] >= opened.done:
            returned.append(opened.assigned.pop())
            opened.total = max(0.0, opened.total - opened.weights.pop())
        for group in returned:
            self._parts.tell(GroupReturned(group=group, step=step))
        opened.offered[:0] = reversed(returned)

    def _go_on(self, opened: OpenStep) -> None:
        """Takes groups while the assigned ones are done; plans the moment they are."""
        self._settle(opened)
        is_idle = opened.done >= opened.total
        while is_idle and self._take(opened):
            is_idle = opened.done >= opened.total
        if is_idle and opened.close is not None:
            self._reduce(opened)
            return
        if is_idle:
            self._rest(opened)
            return
        now_s = self._kernel.now_s
        if not opened.is_working:
            opened.is_working = True
            opened.begins_s = now_s + self._costs.bubble_s
        self._parts.work_on(opened.devices)
        starts_s = max(now_s, opened.begins_s)
        self._plan(starts_s + (opened.total - opened.done) / opened.rate)

    def _take(self, opened: OpenStep) -> bool:
        """Work on the next offered group begins."""
        is_full = len(opened.assigned) >= self._parts.max_groups
        if is_full or opened.close is not None or not opened.offered:
            return False
        group = opened.offered.pop(0)
        weight = self._parts.weigh(group)
        opened.assigned.append(group)
        opened.weights.append(weight)
        opened.total += weight
        self._parts.tell(GroupAssigned(group=group, step=opened.step))
        return True

    def _rest(self, opened: OpenStep) -> None:
        opened.is_working = False
        self._plan(None)
        self._parts.work_on(0)

    def _reduce(self, opened: OpenStep) -> None:
        """The sums come together and the update is made; a drop meanwhile begins it anew."""
        opened.is_working = False
        costs = self._costs
        reduce_s = costs.reduce_s if len(opened.members) > 1 else 0.0
        self._parts.work_on(opened.devices)
        at_s = self._kernel.now_s + reduce_s + costs.optimizer_s
        self._plan(None)
        self._token = self._kernel.at(at_s, lambda: self._commit(opened))

    def _commit(self, opened: OpenStep) -> None:
        command = opened.close
        if command is None:
            raise InvariantError(f"step {opened.step} is committed before it is closed")
        self._step = self._token = None
        self._parts.work_on(0)
        groups = tuple(opened.assigned)
        version = opened.version + (1 if groups else 0)
        self._parts.committed(opened.step, opened.version, groups)
        self._parts.tell(StepCommitted(step=opened.step, version=version))
        self._parts.tell(CommandApplied(command_id=command.command_id))

    def _plan(self, time_s: float | None) -> None:
        if self._token is not None:
            self._kernel.cancel(self._token)
            self._token = None
        opened = self._step
        if time_s is not None and opened is not None:
            self._token = self._kernel.at(time_s, lambda: self._reached(opened))

    def _reached(self, opened: OpenStep) -> None:
        """Every assigned group is done, whatever rounding says."""
        self._token = None
        self._settle(opened)
        opened.done = opened.total
        self._go_on(opened)
