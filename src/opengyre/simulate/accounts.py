"""The books of a simulated run: every device-second in exactly one bucket, and the lanes.

Owns: levels, their integrals over time, lanes. Must not know: the scheduler, what comes next.
Invariants: the levels of all buckets sum to the number of devices at every moment; a change costs
the same whatever the number of engines.
"""

from dataclasses import dataclass, field, replace

from opengyre.control.ids import EngineId
from opengyre.simulate.result import Bucket, Mode, Stretch

MAX_STRETCHES = 50_000
SERVING = (Mode.ROLLOUT, Mode.PUBLISHING)


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """One engine in the books."""

    engine: EngineId
    is_cell: bool
    devices: int
    slots: int
    mode: Mode = Mode.LOST
    since_s: float = 0.0
    num_used: int = 0
    is_joining: bool = False


@dataclass(slots=True, kw_only=True)
class Levels:
    """What is true now, in devices unless a name says otherwise. `num_used_by_size` counts used
    slots of serving engines by (devices, slots)."""

    devices_by_mode: dict[Mode, int] = field(default_factory=lambda: dict.fromkeys(Mode, 0))
    num_used_by_size: dict[tuple[int, int], int] = field(default_factory=dict)
    serving_slots: int = 0
    num_cells_serving: int = 0
    working: int = 0
    joining: int = 0
    saving: int = 0
    waterlevel: int = 0
    is_all_dispatched: bool = False
    is_over: bool = False


class Books:
    """`settle` before any level changes; every method here does.

    `leaving_slots`: the slots that the next role change takes out of rollout; None if the roles
    never change. `max_stretches` bounds the lanes.
    """

    def __init__(
        self,
        accounts: list[Account],
        *,
        leaving_slots: int | None,
        max_stretches: int = MAX_STRETCHES,
    ) -> None:
        self.now = Levels()
        self.by_engine = {account.engine: account for account in accounts}
        self.seconds_by_bucket = dict.fromkeys(Bucket, 0.0)
        self._training_role_s = self._training_idle_s = 0.0
        self._serving_slot_s = self._used_slot_s = 0.0
        self.lanes: list[Stretch] = []
        self.num_left_out = 0
        self._settled_s = 0.0
        self._leaving_slots = leaving_slots
        self._max_stretches = max_stretches
        for account in accounts:
            self.now.devices_by_mode[account.mode] += account.devices
            self.now.num_used_by_size[account.devices, account.slots] = 0

    @property
    def slack(self) -> float:
        """Idle share of the device-time in role training; 0 if there was none."""
        return self._training_idle_s / self._training_role_s if self._training_role_s > 0 else 0.0

    @property
    def occupancy(self) -> float:
        """Used share of the slots of serving engines; 0 if there were none."""
        return self._used_slot_s / self._serving_slot_s if self._serving_slot_s > 0 else 0.0

    def settle(self, now_s: float) -> None:
        """Book the time since the last change under what was true in it."""
        elapsed_s = now_s - self._settled_s
        if elapsed_s <= 0:
            return
        self._settled_s = now_s
        now, seconds = self.now, self.seconds_by_bucket
        by_mode = now.devices_by_mode
        generating = 0.0
        for (devices, slots), num_used in now.num_used_by_size.items():
            generating += num_used * devices / slots
            self._used_slot_s += elapsed_s * num_used
        idle = by_mode[Mode.TRAINING] - now.working - now.joining - now.saving
        self._serving_slot_s += elapsed_s * now.serving_slots
        seconds[Bucket.GENERATING] += elapsed_s * generating
        seconds[Bucket.TRAINING] += elapsed_s * now.working
        seconds[Bucket.MOVING] += elapsed_s * (by_mode[Mode.MOVING] + now.joining)
        seconds[Bucket.PUBLISHING] += elapsed_s * (by_mode[Mode.PUBLISHING] + now.saving)
        seconds[Bucket.LOST] += elapsed_s * by_mode[Mode.LOST]
        seconds[self._why_free()] += elapsed_s * (by_mode[Mode.ROLLOUT] - generating)
        idle_bucket = Bucket.IDLE_AT_END if now.is_over else Bucket.WAITING_FOR_DATA
        seconds[idle_bucket] += elapsed_s * idle
        if not now.is_over:
            self._training_role_s += elapsed_s * by_mode[Mode.TRAINING]
            self._training_idle_s += elapsed_s * idle

    def _why_free(self) -> Bucket:
        """What free slots wait for."""
        now = self.now
        if now.is_over or (now.is_all_dispatched and now.waterlevel == 0):
            return Bucket.IDLE_AT_END
        if now.num_cells_serving == 0 or self._leaving_slots is None:
            return Bucket.WAITING_FOR_DATA
        if now.serving_slots - self._leaving_slots < now.waterlevel:
            return Bucket.WAITING_FOR_COVERAGE
        return Bucket.WAITING_FOR_SUPPLY

    def change_mode(self, account: Account, mode: Mode, now_s: float) -> None:
        if account.mode is mode:
            return
        self.settle(now_s)
        self.end_join(account, now_s)
        self._draw(account, now_s)
        by_mode = self.now.devices_by_mode
        by_mode[account.mode] -= account.devices
        by_mode[mode] += account.devices
        self._count_serving(account, -1)
        account.mode, account.since_s = mode, now_s
        self._count_serving(account, 1)

    def _count_serving(self, account: Account, sign: int) -> None:
        now = self.now
        if account.mode is Mode.ROLLOUT:
            now.num_used_by_size[account.devices, account.slots] += sign * account.num_used
        if account.mode in SERVING:
            now.serving_slots += sign * account.slots
            now.num_cells_serving += sign * account.is_cell

    def change_used(self, account: Account, by: int, now_s: float) -> None:
        self.settle(now_s)
        account.num_used += by
        if account.mode is Mode.ROLLOUT:
            self.now.num_used_by_size[account.devices, account.slots] += by

    def begin_join(self, account: Account, now_s: float) -> None:
        self.settle(now_s)
        if account.mode is Mode.TRAINING and not account.is_joining:
            account.is_joining = True
            self.now.joining += account.devices

    def end_join(self, account: Account, now_s: float) -> None:
        self.settle(now_s)
        if account.is_joining:
            account.is_joining = False
            self.now.joining -= account.devices

    def set_working(self, devices: int, now_s: float) -> None:
        """So many devices of the open step's members work now."""
        self.settle(now_s)
        self.now.working = devices

    def set_saving(self, devices: int, now_s: float) -> None:
        """So many devices write a checkpoint or expose weights now."""
        self.settle(now_s)
        self.now.saving = devices

    def close(self, now_s: float) -> None:
        """The run is over: the last stretches are drawn."""
        self.settle(now_s)
        for account in self.by_engine.values():
            self._draw(account, now_s)
        order = {engine: place for place, engine in enumerate(self.by_engine)}
        self.lanes.sort(key=lambda one: (order[one.engine], one.from_s))
        self.lanes = _merged(self.lanes)

    def _draw(self, account: Account, now_s: float) -> None:
        if now_s <= account.since_s:
            return
        if len(self.lanes) >= self._max_stretches:
            self.num_left_out += 1
            return
        self.lanes.append(
            Stretch(engine=account.engine, mode=account.mode, from_s=account.since_s, to_s=now_s)
        )


def _merged(lanes: list[Stretch]) -> list[Stretch]:
    """Stretches of one mode that touch are one; `lanes` are sorted."""
    merged: list[Stretch] = []
    for one in lanes:
        last = merged[-1] if merged else None
        is_same = last is not None and (last.engine, last.mode) == (one.engine, one.mode)
        if last is not None and is_same and last.to_s == one.from_s:
            merged[-1] = replace(last, to_s=one.to_s)
        else:
            merged.append(one)
    return merged
